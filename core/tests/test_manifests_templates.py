"""Every field of a pod template: a cluster's pods have it, and one machine uses it or says that it has no effect."""

import copy

import pytest

from core.tests.manifests import MANIFEST
from rljob.api.load import validate
from rljob.api.pods import SCHEMA
from rljob.local import honours
from rljob.manifests import render
from rljob.manifests.inputs import Context

GOVERNED = {"restartPolicy", "name", "containers"}
KINDS = {"string": "x", "integer": 7, "number": 7, "boolean": True}
TEMPLATED = {
    "trainer": lambda template: {"trainer": {"template": template}},
    "coordinator": lambda template: {"coordinator": {"template": template}},
    "runner": lambda template: {"runner": {"template": template}},
    "rollout-main": lambda template: {"rollouts": [{"name": "main", "template": template}]},
    "reward-exact": lambda template: {"rewards": [{"name": "exact", "builtin": "reasoning_gym", "template": template}]},
}


def target(schema):
    return SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def properties(*path):
    """Return the fields of what is at ``path`` of a PodTemplateSpec."""
    here = SCHEMA
    for step in path:
        here = target(target(here)["properties"][step])
        here = target(here.get("items", here))
    return target(here)["properties"]


def sample(schema, depth=2):
    """Return a value that the schema allows."""
    schema = target(schema)
    kind = schema.get("type")
    if kind == "array":
        return [sample(schema["items"], depth)]
    if kind == "object" and "properties" in schema:
        fields = schema["properties"]
        wanted = fields if "name" in fields else dict(list(fields.items())[:1])
        return {key: sample(value, depth - 1) for key, value in wanted.items()} if depth else {}
    return {"a": "b"} if kind == "object" else KINDS.get(kind, "x")


def job(role, template):
    manifest = copy.deepcopy(MANIFEST)
    manifest["spec"] |= TEMPLATED[role](template)
    return validate(manifest)


def pod(found, role):
    [rendered] = [entry for entry in render(found, Context(uid="u")) if entry.name == role]
    return next(o["spec"]["template"]["spec"] for o in rendered.objects if "template" in o.get("spec", {}))


def contains(whole, part):
    """Return whether ``part`` is in ``whole``, whatever else is."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(key in whole and contains(whole[key], part[key]) for key in part)
    if isinstance(part, list):
        return isinstance(whole, list) and all(any(contains(entry, wanted) for entry in whole) for wanted in part)
    return whole == part


@pytest.mark.parametrize("role", TEMPLATED)
@pytest.mark.parametrize("field", sorted(properties("spec").keys() - GOVERNED))
def test_a_field_of_the_pod_is_in_the_cluster_and_has_no_effect_on_one_machine(role, field):
    value = sample(properties("spec")[field])
    found = job(role, {"spec": {field: value}})
    assert contains(pod(found, role)[field], value)
    assert any(f"spec.{field}" in note for note in honours.notes(found))


@pytest.mark.parametrize("role", TEMPLATED)
@pytest.mark.parametrize("field", sorted(properties("spec", "containers").keys() - GOVERNED))
def test_a_field_of_the_main_container_is_in_the_cluster_and_honoured_or_said_on_one_machine(role, field):
    value = sample(properties("spec", "containers")[field])
    if field == "env":
        value = [{"name": "MINE", "value": "1"}]
    found = job(role, {"spec": {"containers": [{"name": "main", field: value}]}})
    main = next(container for container in pod(found, role)["containers"] if container["name"] == "main")
    assert contains(main[field], value)
    said = any(f"{field} of main" in note for note in honours.notes(found))
    assert said == (field not in honours.HONOURED_IN_MAIN)
