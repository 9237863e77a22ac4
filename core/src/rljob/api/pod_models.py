"""Pod templates: Kubernetes' PodTemplateSpec with all fields optional.

pod_template.json contains the schema (Kubernetes 1.33, without descriptions; tools/make_pod_schema.py writes it).
A role's template is merged over the pod that rljob renders, by the API's merge keys; the main container is `main`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Annotated, Any

from pydantic import AfterValidator, WithJsonSchema

from rljob.api.field_metadata import FieldMeta
from rljob.api.unsupported import on_one_line

MAIN = "main"
PORT = 8080
"""Port of every rljob server in its pod."""
PORT_NAME = "http"
READERS_PORT = PORT + 1
"""Port of the coordinator's read-only API for port forwarding; it listens on loopback only."""
SCHEMA: dict[str, Any] = json.loads((files("rljob.api") / "pod_template.json").read_bytes())
"""JSON schema of a PodTemplateSpec."""
LIST_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
}
"""List → merge key of its entries, as on the API server."""
MARK = "x-rljob-pod-template"
"""JSON schema keyword for which the CustomResourceDefinition has :data:`SCHEMA`."""
OWN_LABELS = "rljob.dev/"
OWN_VARIABLES = "RLJOB_"

_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "string": (str, "text; put it in quotes"),
    "integer": (int, "a whole number"),
    "number": ((int, float), "a number"),
    "boolean": (bool, "true or false"),
    "array": (list, "a list"),
    "object": (dict, "a mapping"),
}


def check_template(template: dict[str, Any]) -> dict[str, Any]:
    """Return ``template``.

    Raises:
        ValueError: the template is invalid; one line ``path: sentence`` for each problem.
    """
    found = list(_mismatches(template, SCHEMA, "")) or list(_key_problems(template, "")) or list(_governed(template))
    if found:
        raise ValueError("\n".join(map(on_one_line, found)))
    return template


PodTemplate = Annotated[
    dict[str, Any],
    AfterValidator(check_template),
    WithJsonSchema({"type": "object", MARK: True}),
    FieldMeta(reader="pods", local_part="`env` with a value, `command` and `args` of the container `main`"),
]
"""A PodTemplateSpec as a mapping."""


def main_container(template: dict[str, Any] | None) -> dict[str, Any]:
    """Return the main container of a template; empty if it has none."""
    containers = ((template or {}).get("spec") or {}).get("containers") or []
    return next((container for container in containers if container.get("name") == MAIN), {})


def main_variables(template: dict[str, Any] | None) -> dict[str, str]:
    """Return the variables of a template's main container that have values."""
    entries = main_container(template).get("env") or []
    return {entry["name"]: entry["value"] for entry in entries if entry.get("value") is not None}


def _mismatches(value: Any, schema: dict[str, Any], path: str) -> Iterator[str]:
    if value is None:  # null deletes the value that rljob renders
        return
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
    if "type" not in schema:  # a quantity, or a port
        if isinstance(value, bool) or not isinstance(value, int | str):
            yield f"{path.removeprefix('.')}: must be a whole number, or text; put it in quotes"
        return
    kind, description = _KINDS[schema["type"]]
    if not isinstance(value, kind) or (isinstance(value, bool) and schema["type"] != "boolean"):
        yield f"{path.removeprefix('.')}: must be {description}"
    elif isinstance(value, list):
        for i, entry in enumerate(value):
            if entry is None:
                yield f"{path.removeprefix('.')}[{i}]: null deletes nothing in a list; remove it"
            yield from _mismatches(entry, schema["items"], f"{path}[{i}]")
    elif isinstance(value, dict):
        known = schema.get("properties", {})
        for key, entry in value.items():
            if key in known:
                yield from _mismatches(entry, known[key], f"{path}.{key}")
            elif "additionalProperties" in schema:
                yield from _mismatches(entry, schema["additionalProperties"], f"{path}.{key}")
            else:
                close = difflib.get_close_matches(key, known, n=1)
                remedy = f"did you mean {close[0]}?" if close else "a PodTemplateSpec has no such field; remove it"
                yield f"{path.removeprefix('.')}{'.' if path else ''}{key}: unknown field; {remedy}"


def _key_problems(value: Any, path: str) -> Iterator[str]:
    """Yield the entries of lists in LIST_KEYS without a key or with a duplicate key."""
    if isinstance(value, list):
        for i, entry in enumerate(value):
            yield from _key_problems(entry, f"{path}[{i}]")
    elif isinstance(value, dict):
        for field, inner in value.items():
            here = f"{path}.{field}"
            yield from _key_problems(inner, here)
            if field in LIST_KEYS and isinstance(inner, list):
                yield from _entries_without_key(inner, LIST_KEYS[field], here.removeprefix("."), field)


def _entries_without_key(entries: list[dict[str, Any]], key: str, path: str, field: str) -> Iterator[str]:
    keys = [entry.get(key) for entry in entries]
    for i, found in enumerate(keys):
        if found is None:
            hint = f" (the name of rljob's container is {MAIN})" if "ontainers" in field else ""
            yield f"{path}[{i}].{key}: required; add it{hint}"
        elif found in keys[:i]:
            yield f"{path}[{i}].{key}: {found!r} is used twice; give every entry its own {key}"


def _governed(template: dict[str, Any]) -> Iterator[str]:
    """Yield the fields of a template that only rljob may set."""
    for kind in ("labels", "annotations"):
        for key in (template.get("metadata") or {}).get(kind) or {}:
            if key.startswith(OWN_LABELS):
                yield f"metadata.{kind}.{key}: {kind} that begin with {OWN_LABELS} are reserved for rljob; remove it"
    spec = template.get("spec") or {}
    if "restartPolicy" in spec:
        yield "spec.restartPolicy: governed by rljob, which restarts processes itself; remove it"
    for kind in ("containers", "initContainers"):
        for i, container in enumerate(spec.get(kind) or []):
            yield from _ports(f"spec.{kind}[{i}]", container)
            for j, variable in enumerate(container.get("env") or []):
                if str(variable.get("name", "")).startswith(OWN_VARIABLES):
                    yield (
                        f"spec.{kind}[{i}].env[{j}]: variables that begin with {OWN_VARIABLES} are reserved for rljob; "
                        "remove it"
                    )


def _ports(path: str, container: dict[str, Any]) -> Iterator[str]:
    """Yield the ports of a container that conflict with rljob's port."""
    for j, port in enumerate(container.get("ports") or []):
        if port.get("containerPort") == PORT and port.get("protocol") in (None, "TCP"):
            yield (
                f"{path}.ports[{j}]: port {PORT} is reserved for rljob, whose servers read it from RLJOB_LISTEN; "
                "remove it, or use another"
            )
        elif port.get("name") == PORT_NAME:
            yield f"{path}.ports[{j}].name: {PORT_NAME} is the name of rljob's port; choose another"
