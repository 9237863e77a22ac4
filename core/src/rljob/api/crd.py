"""The CustomResourceDefinitions, generated from the models of manifest and status; `make crds` writes them.

Invariants: the same models give the same text; the API server accepts the manifests that :mod:`rljob.api.load` accepts.
Exceptions are the cases that core/tests/crd_cases.py marks as not expressible in CEL; the operator reports these in
conditions.
"""

from __future__ import annotations

import json
from typing import Any

import yaml
from pydantic import BaseModel

from rljob.api.cel_rule import CelRule
from rljob.api.cel_rules import rules
from rljob.api.explain import FieldDoc, fields
from rljob.api.field_docs import documented_schema
from rljob.api.immutable import immutability
from rljob.api.job_status import RLJobStatus
from rljob.api.models import Metadata, RLJob, RLJobSpec
from rljob.api.structural import Schema, ordered, structural
from rljob.api.yaml_loader import Dumper

GROUP = "rljob.dev"
VERSION = "v1alpha1"


def definitions() -> dict[str, dict[str, Any]]:
    """Return name without group (rljobs, rljobscales) → CustomResourceDefinition."""
    return {"rljobs": rljob(), "rljobscales": rljobscale()}


def rljob() -> dict[str, Any]:
    """Return the CustomResourceDefinition of RLJob."""
    spec = _schema_of(RLJobSpec, defaults=True)
    for field in ("evaluation.tasks", "evaluation.passAt", "algorithm.teachers[].tasks"):
        _at(spec, field)["x-kubernetes-list-type"] = "set"
    _add_descriptions(spec, "spec", fields())
    status = _schema_of(RLJobStatus, defaults=False)
    _open_condition_types(status)
    schema = _object(str(RLJob.__doc__), spec, status)
    schema["required"] = ["metadata", "spec"]
    name = _schema_of(Metadata, defaults=False)["properties"]["name"]
    schema["properties"]["metadata"] |= {"properties": {"name": name}}
    for rule in (*rules(), *immutability(spec)):
        add(schema, rule)
    names = {"kind": "RLJob", "plural": "rljobs", "shortNames": ["rlj"], "categories": ["rl"]}
    return _definition(names, schema, COLUMNS, {"status": {}})


def rljobscale() -> dict[str, Any]:
    """Return the CustomResourceDefinition of RLJobScale: the desired replicas of one role of a job."""
    count = {"type": "integer", "format": "int32", "minimum": 0}
    spec = {
        "description": "Desired state.",
        "type": "object",
        "properties": {
            "job": {
                "description": "Name of the RLJob of the role.",
                "type": "string",
                "maxLength": 63,
            },
            "role": {
                "description": "Name of the role: rollout-POOL, reward-NAME, environment-NAME, runner.",
                "type": "string",
                "maxLength": 253,
            },
            "replicas": count
            | {
                "description": "Desired replicas, written by kubectl scale and autoscalers. The operator keeps it "
                "between min and max of the role's replicas. Default: min.",
            },
        },
    }
    status = {
        "description": "Observed state. Written by the operator.",
        "type": "object",
        "properties": {
            "replicas": count | {"description": "Pods of the role."},
            "selector": {
                "description": "Label selector of the role's pods, for autoscalers.",
                "type": "string",
                "maxLength": 4096,
            },
            "message": {
                "description": "Which bound of the role applies, if spec.replicas is outside its range.",
                "type": "string",
                "maxLength": 4096,
            },
        },
    }
    names = {"kind": "RLJobScale", "plural": "rljobscales", "shortNames": ["rljs"], "categories": ["rl"]}
    scale = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    description = "Replicas of one role of an RLJob, written by kubectl scale and autoscalers."
    schema = _object(description, _deep_ordered(spec), _deep_ordered(status))
    return _definition(names, schema, SCALE_COLUMNS, {"status": {}, "scale": scale})


def add(schema: Schema, rule: CelRule) -> None:
    """Add ``rule`` to the schema at its path, in place."""
    at = _at(schema, rule.at)
    validation = {"rule": rule.rule, "message": rule.message}
    validation |= {"fieldPath": rule.field} if rule.field else {}
    at["x-kubernetes-validations"] = [*at.get("x-kubernetes-validations", []), validation]


def _open_condition_types(status: Schema) -> None:
    """Allow conditions of other controllers, and of newer operators: an enumeration would refuse the whole status."""
    condition = _at(status, "conditions[]")["properties"]
    closed = {name: value for name, value in condition["type"].items() if name != "enum"}
    condition["type"] = ordered(closed | {"maxLength": 316, "pattern": CONDITION_TYPE})


def _column(name: str, path: str, kind: str = "string", wide: bool = False, description: str = "") -> dict[str, Any]:
    column = {"name": name, "type": kind, "jsonPath": path}
    column |= {"description": description} if description else {}
    return column | ({"priority": 1} if wide else {})


CONDITION_TYPE = (
    r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$"
)
"""Type of a condition, as in metav1.Condition."""
_READY = '.status.conditions[?(@.type=="Ready")]'
COLUMNS = [
    _column("Ready", f"{_READY}.reason", description="Running, or the reason why the job is not running."),
    _column("Step", ".status.run.progress.step", "integer", description="Applied batches."),
    _column("Progress", ".status.run.progress.text", description="Steps applied of all steps."),
    _column("Trainer", ".status.ready.trainer", description="Ready/desired pods of the trainer."),
    _column("Rollout", ".status.ready.rollout", description="Ready/desired pods of all pools."),
    _column("Reward", ".status.ready.reward", description="Ready/desired pods of all reward services."),
    _column("Staleness", ".status.run.staleness", description="Mean/maximum of the last batch, in policy versions."),
    _column("Age", ".metadata.creationTimestamp", "date"),
    _column(
        "Environment", ".status.ready.environment", wide=True, description="Ready/desired pods of all environments."
    ),
    _column("Run", ".status.run.state", wide=True, description="State of the run, written by the coordinator."),
    _column(
        "Tokens/s",
        '.status.run.metrics[?(@.name=="tokens_per_second")].value',
        "integer",
        True,
        "Tokens sampled per second.",
    ),
    _column("Mean reward", '.status.run.metrics[?(@.name=="reward/mean")].value', "number", True, "Of the last batch."),
    _column("Checkpoint", ".status.run.lastCheckpoint.step", "integer", True, "Step of the newest durable checkpoint."),
    _column("Attempt", ".status.trainer.number", "integer", True, "Attempt of the trainer, counted from 1."),
    _column("Restarts", ".status.ready.restarts", wide=True, description="Failures by role."),
    _column("Message", f"{_READY}.message", wide=True, description="Explanation, with a remedy if there is one."),
]
SCALE_COLUMNS = [
    _column("Job", ".spec.job"),
    _column("Role", ".spec.role"),
    _column("Desired", ".spec.replicas", "integer"),
    _column("Pods", ".status.replicas", "integer"),
    _column("Age", ".metadata.creationTimestamp", "date"),
    _column("Message", ".status.message"),
]


def _definition(
    names: dict[str, Any], schema: Schema, columns: list[dict[str, Any]], subresources: dict[str, Any]
) -> dict[str, Any]:
    names = names | {"singular": names["kind"].lower(), "listKind": f"{names['kind']}List"}
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": columns,
        "subresources": subresources,
        "schema": {"openAPIV3Schema": schema},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{names['plural']}.{GROUP}",
            # Uninstalling the chart must not delete the definition, which would delete every job.
            "annotations": {"helm.sh/resource-policy": "keep"},
        },
        "spec": {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
    }


def _object(description: str, spec: Schema, status: Schema) -> Schema:
    text = {"type": "string"}
    return {
        "description": description,
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": dict(text),
            "kind": dict(text),
            "metadata": {"type": "object"},
            "spec": spec,
            "status": status,
        },
    }


def _add_descriptions(schema: Schema, path: str, docs: dict[str, FieldDoc]) -> None:
    """Set the description of every field to that of `rljob explain`, which includes values without support."""
    for name, inner in schema.get("properties", {}).items():
        if doc := docs.get(f"{path}.{name}"):
            inner["description"] = doc.meaning
            _add_descriptions(inner.get("items", inner), f"{path}.{name}", docs)


def _schema_of(model: type[BaseModel], *, defaults: bool) -> Schema:
    schema = documented_schema(model)
    return structural(schema, schema.get("$defs", {}), defaults=defaults)


def _at(schema: Schema, path: str) -> Schema:
    """Return the schema at ``path``, in which [] stands for the entries of a list: spec.tasks[].data."""
    for step in filter(None, path.replace("[]", ".[]").split(".")):
        schema = schema["items"] if step == "[]" else schema["properties"][step]
    return schema


def _deep_ordered(schema: Schema) -> Schema:
    properties = {name: _deep_ordered(inner) for name, inner in schema.get("properties", {}).items()}
    return ordered(schema | ({"properties": properties} if properties else {}))


HEADER = "# Generated by `make crds` from rljob.api; not to be edited.\n"
MAX_FLOW_CHARACTERS = 100
"""Maximum length of a mapping or list of scalars on one line, in characters of JSON."""
MIN_ALIAS_CHARACTERS = 2000
"""Minimum length of a value that is written once and repeated by aliases, in characters of JSON."""


def to_yaml(definition: dict[str, Any]) -> str:
    """Return ``definition`` as YAML; the same definition gives the same text."""
    shared: dict[str, Any] = {}
    return HEADER + yaml.dump(
        _shared(definition, shared), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, indent=2
    )


def _shared(data: Any, seen: dict[str, Any]) -> Any:
    """Return a copy of ``data`` in which equal large values are one object. ``seen``: JSON → object."""
    if not isinstance(data, dict | list):
        return data
    written = json.dumps(data)
    if len(written) >= MIN_ALIAS_CHARACTERS and written in seen:
        return seen[written]
    copy: Any
    if isinstance(data, dict):
        copy = {key: _shared(value, seen) for key, value in data.items()}
    else:
        copy = [_shared(value, seen) for value in data]
    if len(written) >= MIN_ALIAS_CHARACTERS:
        seen[written] = copy
    return copy


class _Dumper(Dumper):
    """Writes short mappings on one line, and aliases for values that are one object after :func:`_shared`."""

    def ignore_aliases(self, data: Any) -> bool:
        return not isinstance(data, dict | list) or len(json.dumps(data)) < MIN_ALIAS_CHARACTERS

    def generate_anchor(self, node: yaml.Node) -> str:
        return super().generate_anchor(node).replace("id", "part-")

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        return super().represent_mapping(tag, mapping, _fits(mapping.values(), mapping) or flow_style)

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        return super().represent_sequence(tag, sequence, _fits(sequence, sequence) or flow_style)


def _fits(values: Any, whole: Any) -> bool:
    plain = all(not isinstance(value, dict | list) for value in values)
    return plain and len(json.dumps(whole)) <= MAX_FLOW_CHARACTERS
