"""rljob and the API server have the same bound for every field of a manifest: on the bound, and just beyond it."""

from __future__ import annotations

import copy
import json
import re

import pytest
from pydantic import ValidationError

from core.tests.manifests import MANIFEST
from rljob.api.cel_rules import rules
from rljob.api.crd import definitions
from rljob.api.errors import path_text
from rljob.api.models import RLJob
from tools.cluster.client import ApiError

SCHEMA = definitions()["rljobs"]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
SENTENCES = {rule.message for rule in rules()}
LONGEST_TRIED = 5000
"""Texts and lists with larger bounds are not tested."""


def leaves(schema, path):
    """Yield path and schema of every field that holds a single value or a list, pod templates left out."""
    for name, inner in schema.get("properties", {}).items():
        if name == "template":
            continue
        yield from leaves(inner, f"{path}.{name}")
    if schema.get("type") == "array":
        yield path, schema
        yield from leaves(schema["items"], f"{path}[0]")
    elif schema.get("type") != "object":
        yield path, schema


def values_to_try(schema):
    """Yield values on the bounds of a field, beyond them, and of other types."""
    kind = schema["type"]
    yield from {"string": [5, ["a"]], "array": ["x", {"a": 1}], "boolean": ["true", 1]}.get(kind, ["5", [1], True])
    if kind in ("integer", "number"):
        least, most = schema["minimum"], schema.get("maximum")
        yield from (least, least - 1, least + 0.5)
        if most is not None:
            yield from (most, most + 1)
    if kind == "string":
        text = {"enum": ["no-such-word"]}.get("enum" if "enum" in schema else "", ["a", "A b!", "-a", "a-", "9", "a\n"])
        yield from text
        yield from schema.get("enum", [])
        yield ""
        if "maxLength" in schema and schema["maxLength"] < LONGEST_TRIED:
            yield from ("a" * schema["maxLength"], "a" * (schema["maxLength"] + 1), "é" * schema["maxLength"])
    if kind == "array":
        yield []


def with_value(path, value):
    """Return the smallest manifest with ``value`` at ``path``; missing parents are created."""
    data = copy.deepcopy(MANIFEST)
    steps = re.findall(r"[^.\[\]]+", path)
    here = data
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        key = int(step) if step.isdigit() else step
        if following is None:
            here[key] = value
        elif isinstance(here, list):
            here = here[0]
        elif following == "0":
            if not here.get(key):
                here[key] = [{}]
            here = here[key]
        else:
            here = here.setdefault(key, {})
    return data


def errors_of_rljob(data, path):
    try:
        RLJob.model_validate_json(json.dumps(data), strict=True, by_alias=True, by_name=False)
    except ValidationError as error:
        found = [detail for detail in error.errors() if detail["type"] != "value_error"]  # rules across fields
        return [detail for detail in found if below(path_text(detail["loc"]), path)]
    return []


def below(field, path):
    return field == path or field.startswith(f"{path}[")


def errors_of_api_server(cluster, jobs, data, path):
    try:
        cluster.api.post(jobs, data, fieldValidation="Strict", dryRun="All")
    except ApiError as error:
        causes = error.body.get("details", {}).get("causes", [])
        if not causes:  # the type could not be decoded
            return [error.message] if path.rpartition(".")[2] in error.message else []
        bounds = [cause for cause in causes if not any(sentence in cause["message"] for sentence in SENTENCES)]
        return [cause for cause in bounds if below(cause["field"], path)]
    return []


@pytest.mark.timeout(300)  # more than a thousand requests
def test_every_bound_of_every_field_is_the_same_to_rljob_and_to_the_api_server(cluster, namespace):
    jobs = cluster.api.path("rljob.dev/v1alpha1", "RLJob", namespace)
    differing, count = [], 0
    for path, schema in leaves(SCHEMA["properties"]["spec"], "spec"):
        for value in values_to_try(schema):
            data = with_value(path, value)
            ours, theirs = errors_of_rljob(data, path), errors_of_api_server(cluster, jobs, data, path)
            count += 1
            if bool(ours) != bool(theirs):
                differing.append((path, str(value)[:40], ours, theirs))
    assert differing == [], "\n".join(map(str, differing))
    assert count > 1000
