"""Every field of a pod template is in the cluster's pods. On one machine it is applied, or a warning names it."""

import copy

import pytest

from core.tests.manifests import MANIFEST
from rljob.api.load import validate
from rljob.api.pod_models import SCHEMA
from rljob.local import field_support
from rljob.manifests import render
from rljob.manifests.inputs import RenderTarget

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
    """Return the fields of the object at ``path`` of a PodTemplateSpec."""
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
    [rendered] = [entry for entry in render(found, RenderTarget(uid="u")) if entry.name == role]
    return next(o["spec"]["template"]["spec"] for o in rendered.objects if "template" in o.get("spec", {}))


def contains(whole, part):
    """Return whether ``whole`` contains ``part``."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(key in whole and contains(whole[key], part[key]) for key in part)
    if isinstance(part, list):
        return isinstance(whole, list) and all(any(contains(entry, wanted) for entry in whole) for wanted in part)
    return whole == part


def _fields(*path):
    return sorted(properties(*path).keys() - GOVERNED)


def _wrong_in_the_pod(role, fields):
    """Return the fields of the pod that are not in the cluster's pod, or not named as without effect on one machine."""
    wrong = []
    for field in fields:
        value = sample(properties("spec")[field])
        found = job(role, {"spec": {field: value}})
        rendered = pod(found, role).get(field)
        if not contains(rendered, value):
            wrong.append(f"{role}: spec.{field}: {value} is not in {rendered}")
        if not any(f"spec.{field}" in note for note in field_support.warnings(found)):
            wrong.append(f"{role}: spec.{field}: no warning names it")
    return wrong


def _wrong_in_the_main_container(role, fields):
    """Return the fields of the main container that are not in the cluster's pod, or whose note is wrong."""
    wrong = []
    for field in fields:
        value = sample(properties("spec", "containers")[field])
        if field == "env":
            value = [{"name": "MINE", "value": "1"}]
        found = job(role, {"spec": {"containers": [{"name": "main", field: value}]}})
        main = next(container for container in pod(found, role)["containers"] if container["name"] == "main")
        if not contains(main.get(field), value):
            wrong.append(f"{role}: containers[main].{field}: {value} is not in {main.get(field)}")
        noted = any(f"{field} of main" in note for note in field_support.warnings(found))
        if noted == (field in field_support.SUPPORTED_IN_MAIN):
            wrong.append(f"{role}: containers[main].{field}: applied and noted, or neither")
    return wrong


def test_every_field_of_the_pod_is_in_the_cluster_and_has_no_effect_on_one_machine():
    assert len(_fields("spec")) > 30
    wrong = _wrong_in_the_pod("trainer", _fields("spec"))
    assert not wrong, "\n".join(wrong)


def test_every_field_of_the_main_container_is_in_the_cluster_and_applied_or_noted_on_one_machine():
    assert len(_fields("spec", "containers")) > 15
    wrong = _wrong_in_the_main_container("trainer", _fields("spec", "containers"))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("role", TEMPLATED)
def test_the_template_of_every_role_is_merged(role):
    """One field of each kind (value, mapping, list, keyed list) is sufficient, because the merge is one function."""
    of_the_pod = ["priorityClassName", "nodeSelector", "tolerations", "volumes"]
    of_the_container = ["env", "image", "resources", "volumeMounts"]
    wrong = _wrong_in_the_pod(role, of_the_pod) + _wrong_in_the_main_container(role, of_the_container)
    assert not wrong, "\n".join(wrong)
