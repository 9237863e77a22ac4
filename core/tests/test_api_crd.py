"""The CustomResourceDefinitions generated from the models, without an API server."""

import json
import re
import tomllib

import pytest
import yaml

from core.tests.crd_cases import BOUNDS, CHANGES, FIELDS, GOOD, ONLY_IN_A_CLUSTER, UNSUPPORTED, Case, changed
from rljob.api.cel_rules import rules
from rljob.api.crd import definitions, to_yaml
from rljob.api.errors import ManifestError
from rljob.api.field_metadata import manifest_fields
from rljob.api.load import validate
from rljob.api.models import RLJobSpec
from rljob.api.structural import structural
from rljob.api.yaml_loader import read_yaml
from rljob.manifests.problems import problems as problems_in_a_cluster
from tools.generate import ROOT, problems

LARGEST = 700 * 1024
"""Maximum size of a definition in bytes. etcd's limit is 1.5 MiB, which also covers the managed fields."""
DEFINITIONS = definitions()
SCHEMA = DEFINITIONS["rljobs"]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def fields(schema, path=""):
    """Yield path and schema of every field except pod templates."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        if name != "template":
            yield from fields(inner, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from fields(schema[key], f"{path}[]")


OWN = [(path, schema) for part in ("spec", "status") for path, schema in fields(SCHEMA["properties"][part], part)]


@pytest.mark.parametrize("case", [*GOOD, *FIELDS, *BOUNDS, *UNSUPPORTED], ids=lambda case: case.name)
def test_rljob_reports_the_problem_of_each_case(case: Case):
    if not case.message:
        validate(changed(case.change))
        return
    with pytest.raises(ManifestError) as caught:
        validate(changed(case.change))
    assert any(case.message in problem for problem in caught.value.problems), caught.value.problems


def test_a_case_with_different_messages_has_a_reason():
    for case in (*FIELDS, *BOUNDS, *UNSUPPORTED):
        assert case.why or case.server_message == case.message or "unknown field" in case.message, case.name


def test_the_committed_files_match_the_models():
    assert [problem for problem in problems() if "make crds" in problem or "nothing generates" in problem] == []


def test_the_chart_of_the_definitions_has_the_version_of_core():
    project = tomllib.loads((ROOT / "core" / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((ROOT / "charts" / "rljob-crds" / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == project["version"]


def test_a_file_that_differs_is_reported_with_the_command_that_updates_it(tmp_path):
    (tmp_path / "crds").mkdir()
    (tmp_path / "crds" / "rljob.dev_rljobs.yaml").write_text("old")
    (tmp_path / "crds" / "stray.yaml").write_text("old")
    found = problems(tmp_path)
    assert "crds/rljob.dev_rljobs.yaml: out of date; run make crds" in found
    assert "crds/rljob.dev_rljobscales.yaml: missing; run make crds" in found
    assert "docs/cli.md: missing; run make docs" in found
    assert "crds/stray.yaml: nothing generates it; remove it" in found


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_definition_is_small_enough_and_read_the_same_by_every_reader_of_yaml(name):
    definition = DEFINITIONS[name]
    written = to_yaml(definition)
    assert len(json.dumps(definition, separators=(",", ":"))) <= LARGEST
    assert len(written) <= LARGEST
    assert read_yaml(written) == definition
    assert yaml.safe_load(written) == definition


def test_every_field_outside_pod_templates_has_a_description():
    undocumented = [path for path, schema in OWN if not path.endswith("[]") and not schema.get("description")]
    assert undocumented == []


def test_kubectl_explain_names_values_without_support():
    groups = SCHEMA["properties"]["spec"]["properties"]["weightSync"]["properties"]["groups"]
    assert groups["description"].endswith("`shared` is not supported yet.")


def _is_bounded(path, schema):
    kind = schema.get("type")
    if kind == "string":
        return "maxLength" in schema or "enum" in schema
    if kind == "array":
        return "maxItems" in schema
    if kind == "object":
        return "properties" in schema or "maxProperties" in schema
    if kind in ("integer", "number") and path.startswith("spec"):
        return "minimum" in schema
    return True


def test_every_string_list_and_mapping_and_every_number_of_the_spec_is_bounded():
    assert len(OWN) > 250
    unbounded = [path for path, schema in OWN if not _is_bounded(path, schema)]
    assert not unbounded, ", ".join(unbounded)


def test_no_nullable_field_and_no_status_field_has_a_default():
    assert [path for path, schema in OWN if schema.get("nullable") and "default" in schema] == []
    assert [path for path, schema in OWN if path.startswith("status") and "default" in schema] == []


def test_every_list_of_named_entries_is_merged_by_name():
    keys = {path: schema.get("x-kubernetes-list-map-keys") for path, schema in OWN if schema.get("type") == "array"}
    by_name = {path for path, found in keys.items() if found == ["name"]}
    assert by_name == {
        *("spec.models", "spec.tasks", "spec.tasks[].moreRewards", "spec.rewards"),
        *("spec.environments", "spec.rollouts"),
        *("spec.network.allowFrom", "spec.network.egress.to", "spec.network.nodes"),
        *("spec.rewards[].egress.to", "spec.environments[].egress.to"),
        *("status.roles", "status.run.queues", "status.run.metrics", "status.run.engines"),
    }
    assert keys["status.conditions"] == ["type"]


def test_a_pod_template_requires_only_keys_and_accepts_null_elsewhere():
    template = SCHEMA["properties"]["spec"]["properties"]["trainer"]["properties"]["template"]
    required = {path: schema["required"] for path, schema in fields(template) if "required" in schema}
    lists = {f".spec.{kind}[]": "name" for kind in ("volumes", "containers", "initContainers")}
    for kind in ("containers", "initContainers", "ephemeralContainers"):
        lists |= {f".spec.{kind}[].env[]": "name", f".spec.{kind}[].volumeMounts[]": "mountPath"}
    assert required == {path: [key] for path, key in lists.items()}
    keys = {f"{path}.{key}" for path, found in required.items() for key in found}
    rigid = [
        path
        for path, schema in fields(template)
        if path and not path.endswith("[]") and not schema.get("nullable") and path not in keys
    ]
    assert rigid and all(path.endswith(".restartPolicy") for path in rigid)


def test_every_rule_is_a_sentence_without_a_full_stop():
    for path, schema in fields(SCHEMA):
        for rule in schema.get("x-kubernetes-validations", []):
            assert " " in rule["message"] and not rule["message"].endswith("."), f"{path}: {rule}"


def test_every_rule_has_a_case():
    messages = [case.server_message for case in FIELDS if case.server_message]
    assert [rule for rule in rules() if not any(message in rule.message for message in messages)] == []


def test_every_field_is_immutable_or_has_mutable_metadata():
    ruled = {
        re.match(r"^\.?(\w+)", rule["fieldPath"])[1]
        for rule in SCHEMA["properties"]["spec"]["x-kubernetes-validations"]
        if "oldSelf" in rule["rule"]
    }
    spec = manifest_fields(RLJobSpec)
    mutable = {path.partition(".")[0].removesuffix("[]") for path, field in spec.items() if field.mutable != "never"}
    assert ruled | mutable == {field.alias for field in RLJobSpec.model_fields.values()}


def test_the_schema_has_every_field_of_the_metadata():
    paths = {path for path, _ in OWN}
    templates = {f"spec.{path}" for path, field in manifest_fields(RLJobSpec).items() if field.local_part}
    assert {f"spec.{path}" for path in manifest_fields(RLJobSpec)} - templates <= paths
    assert {path.removesuffix(".template") for path in templates} <= paths


@pytest.mark.parametrize(
    "case",
    [case for case in FIELDS if case.why == ONLY_IN_A_CLUSTER or "image" in case.name],
    ids=lambda case: case.name,
)
def test_the_operator_refuses_the_cases_that_only_the_api_server_refuses(case: Case):
    found = problems_in_a_cluster(validate(changed(case.change)))
    assert any((case.server_message or "has no image") in problem for problem in found), found


def test_every_tested_change_applies_to_the_smallest_manifest():
    for change, _ in CHANGES:
        if "[]" not in change:
            changed((change,))


def test_a_keyword_without_structural_equivalent_is_an_error():
    with pytest.raises(AssertionError, match="no structural schema has multipleOf"):
        structural({"type": "integer", "multipleOf": 2, "title": "Even"}, {}, defaults=True)
    with pytest.raises(AssertionError, match="a union besides null"):
        structural({"anyOf": [{"type": "integer"}, {"type": "string"}]}, {}, defaults=True)
