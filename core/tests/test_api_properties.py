"""Random values of fields are refused in sentences, or the job survives every serialization."""

import json

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from rljob.api.algorithm_presets import PRESETS
from rljob.api.errors import ManifestError
from rljob.api.explain import explain, to_data
from rljob.api.load import loads, validate
from rljob.api.models import RLJob
from rljob.api.resolve import resolve
from rljob.api.yaml_loader import write_yaml

SCHEMA = RLJob.model_json_schema(by_alias=True)
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
EXAMPLES = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


def target(schema):
    """Return the schema behind a reference or `| null`."""
    if "$ref" in schema:
        return SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
    return target(schema["anyOf"][0]) if "anyOf" in schema else schema


def values(schema):
    """Return a strategy for the values that a schema allows."""
    schema = target(schema)
    kind = schema.get("type")
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    if kind == "integer":
        return st.integers(schema.get("minimum", -(2**31)), schema.get("maximum", 2**31))
    if kind == "number":
        least = schema.get("minimum", schema.get("exclusiveMinimum"))
        most = schema.get("maximum", schema.get("exclusiveMaximum", 1e9))
        return st.floats(least, most, exclude_min="minimum" not in schema, exclude_max="exclusiveMaximum" in schema)
    if kind == "string":
        return st.from_regex(schema["pattern"], fullmatch=True) if "pattern" in schema else TEXT
    if "prefixItems" in schema:
        return st.tuples(*map(values, schema["prefixItems"])).map(list)
    if kind == "array":
        return st.lists(values(schema["items"]), min_size=schema.get("minItems", 0), max_size=2)
    if "properties" in schema:
        fields = {name: values(field) for name, field in schema["properties"].items()}
        required = {name: fields.pop(name) for name in schema.get("required", [])}
        return st.fixed_dictionaries(required, optional=fields)
    return {"boolean": st.booleans(), "object": st.dictionaries(TEXT, JSON, max_size=2)}.get(kind, JSON)


def fields(schema, path):
    """Yield path and schema of every field below ``schema``; the path of a list's entry has index 0."""
    schema = target(schema)
    if schema.get("type") == "array" and "items" in schema:
        yield from fields(schema["items"], f"{path}[0]")
    for name, field in schema.get("properties", {}).items():
        yield f"{path}.{name}", field
        yield from fields(field, f"{path}.{name}")


FIELDS = {path: values(field) for path, field in fields(SCHEMA["$defs"]["RLJobSpec"], "spec")}


def overrides_of(any_value):
    """Return a strategy for `--set` entries with valid values, or with values of the strategy ``any_value``."""
    entry = st.sampled_from(sorted(FIELDS)).flatmap(
        lambda path: st.tuples(st.just(path), FIELDS[path] if any_value is None else any_value).map(
            lambda both: f"{both[0]}={json.dumps(both[1], ensure_ascii=False)}"
        )
    )
    return st.lists(entry, max_size=3)


@EXAMPLES
@given(overrides=overrides_of(None), preset=st.sampled_from(sorted(PRESETS)))
@example(overrides=['spec.trainer.accelerator.profile="a"'], preset="grpo")
def test_a_job_survives_every_serialization(manifest, overrides, preset):
    try:
        job = loads(write_yaml(manifest), [*overrides, f"spec.algorithm.preset={preset}"])
    except ManifestError:
        assume(False)
    data = to_data(job)
    assert validate(json.loads(json.dumps(data))) == job
    assert loads(write_yaml(data)) == job
    resolved = resolve(job)
    assert resolve(resolved) == resolved
    assert loads(explain(job)) == resolved
    assert RLJob.model_validate_json(resolved.model_dump_json(by_alias=True)) == resolved


@EXAMPLES
@given(overrides=overrides_of(None) | overrides_of(JSON))
def test_invalid_values_are_refused_in_sentences(manifest, overrides):
    try:
        loads(write_yaml(manifest), overrides)
    except ManifestError as error:
        assert error.problems
        for problem in error.problems:
            assert problem.startswith(("spec", "--set")), problem
            assert "\n" not in problem


@EXAMPLES
@given(data=st.dictionaries(st.sampled_from(["apiVersion", "kind", "metadata", "spec", "x"]), JSON) | JSON)
def test_arbitrary_data_is_refused_without_a_traceback(data):
    with pytest.raises(ManifestError):
        loads(write_yaml(data))
