"""The API server and rljob reject the same manifests with the same messages: one table of cases for both."""

from __future__ import annotations

import copy
import json
import re

import msgspec
import pytest

from core.tests.crd_cases import BOUNDS, CHANGES, FIELDS, GOOD, UNSUPPORTED, WRITTEN_NULL, Case, changed
from core.tests.manifests import entries_of
from rljob.api.algorithm_presets import PRESETS
from rljob.api.crd import definitions
from rljob.api.explain import to_data
from rljob.api.immutable import CHANGED, immutability
from rljob.api.load import override, validate
from rljob.api.resolve import resolve
from rljob.api.yaml_loader import write_yaml
from rljob.manifests.problems import problems
from rljob.operator.cache import CachedJob
from rljob.operator.decoded_jobs import read_manifest
from tools.cluster.client import ApiError

API = "rljob.dev/v1alpha1"
STRICT = {"fieldValidation": "Strict"}
DRY = STRICT | {"dryRun": "All"}


def refusal(error: ApiError) -> str:
    """Return the whole body of a rejection as text."""
    return json.dumps(error.body, ensure_ascii=False).replace('\\"', '"')


@pytest.fixture
def jobs(cluster, namespace):
    """Path of the namespace's RLJobs."""
    return cluster.api.path(API, "RLJob", namespace)


@pytest.mark.parametrize("case", [*GOOD, *FIELDS, *BOUNDS, *UNSUPPORTED], ids=lambda case: case.name)
def test_the_api_server_reports_the_error_of_each_case(cluster, jobs, case: Case):
    if not case.server_message:
        cluster.api.post(jobs, changed(case.change), **DRY)
        return
    with pytest.raises(ApiError) as caught:
        cluster.api.post(jobs, changed(case.change), **DRY)
    assert caught.value.code in (400, 422)
    assert case.server_message in refusal(caught.value)


LEFT = [case for case in (*FIELDS, *BOUNDS, *UNSUPPORTED) if not case.server_message and case.why != WRITTEN_NULL]


@pytest.mark.parametrize("case", LEFT, ids=lambda case: case.name)
def test_the_operator_finds_errors_that_the_api_server_does_not_check(cluster, jobs, case: Case):
    cluster.api.post(jobs, changed(case.change), **STRICT)
    [seen] = msgspec.json.decode(json.dumps(cluster.api.list(jobs)), type=list[CachedJob])
    manifest = read_manifest(seen)
    found = manifest.problems if manifest.job is None else problems(manifest.job)
    assert any((case.message or "has no image") in problem for problem in found), found


@pytest.mark.parametrize(("change", "says"), CHANGES, ids=[f"{change[:60]}" for change, _ in CHANGES])
def test_the_api_server_rejects_changes_of_immutable_fields(cluster, jobs, change, says):
    old = cluster.api.post(jobs, changed(()), **STRICT)
    override(old, change)
    path = f"{jobs}/{old['metadata']['name']}"
    if not says:
        cluster.api.put(path, old, **DRY)
        return
    with pytest.raises(ApiError) as caught:
        cluster.api.put(path, old, **DRY)
    assert says in refusal(caught.value).replace('Invalid value: "object"', "Invalid value")


def immutable_values():
    """Yield the path of every immutable field that holds a single value, and another value for it."""
    schema = definitions()["rljobs"]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    spec = schema["properties"]["spec"]
    for rule in immutability(spec):
        path = f"{rule.at}{rule.field}"
        field = schema
        for step in re.findall(r"\w+|\[\]", path):
            field = field["items"] if step == "[]" else field["properties"][step]
        if rule.message == CHANGED and field["type"] not in ("object", "array"):
            other = {"integer": 77, "number": 7.5, "boolean": not field.get("default"), "string": "http://b"}
            current = (field.get("default"), "reasoning_gym")  # the values of the job
            words = [word for word in field.get("enum", []) if word not in current]
            yield path, words[-1] if words else other[field["type"]]


IMMUTABLE = list(immutable_values())


def test_a_change_of_every_immutable_value_is_rejected(cluster, jobs):
    old = cluster.api.post(jobs, changed(("spec.environments=[{name: a, builtin: frozen_lake}]",)), **STRICT)
    wrong = []
    for path, value in IMMUTABLE:
        new = copy.deepcopy(old)
        override(new, f"{path.replace('[]', '[0]')}={json.dumps(value)}")
        try:
            cluster.api.put(f"{jobs}/sums", new, **DRY)
        except ApiError as error:
            fields = [cause["field"] for cause in error.body["details"]["causes"] if CHANGED in cause["message"]]
            if fields != [path.replace("[]", "[0]")]:
                wrong.append((path, value, error.message))
        else:
            wrong.append((path, value, "accepted"))
    assert wrong == []
    assert len(IMMUTABLE) > 20


def test_a_job_with_every_field_set_can_be_written_back_unchanged(cluster, jobs):
    """Neither defaults that the API server sets nor nulls count as a change."""
    full = to_data(resolve(validate(changed(("spec.evaluation={}", "spec.environments=[]")))))
    cluster.api.post(jobs, full, **STRICT)
    path = f"{jobs}/{full['metadata']['name']}"
    stored = cluster.api.get(path)
    cluster.api.put(path, stored, **STRICT)
    assert cluster.api.get(path)["metadata"]["generation"] == 1
    without = {key: value for key, value in stored["spec"].items() if value is not None}
    cluster.api.put(path, stored | {"spec": without}, **STRICT)


def read_back(cluster, jobs, manifest):
    """Create the RLJob of a manifest and return the job that is read back from the API server."""
    cluster.api.post(jobs, manifest, **STRICT)
    stored = cluster.api.get(f"{jobs}/{manifest['metadata']['name']}")
    return validate({**manifest, "spec": stored["spec"]})


GRPO_ONLY = ("dr_grpo", "one sample per prompt with GRPO")
PPO_ONLY = [case for case in GOOD if case.name.startswith("PPO with")]
PRESET_CASES = [
    (preset, case)
    for preset in ("grpo", "dr_grpo")
    for case in GOOD
    if (preset, case.name) != GRPO_ONLY and case not in PPO_ONLY
]
PRESET_CASES += [("ppo", case) for case in PPO_ONLY]
PRESET_CASES += [(preset, GOOD[0]) for preset in PRESETS if preset not in ("grpo", "dr_grpo")]


@pytest.mark.parametrize(
    ("preset", "case"), PRESET_CASES, ids=[f"{preset}-{case.name}" for preset, case in PRESET_CASES]
)
def test_a_job_read_back_from_the_api_server_resolves_as_its_file_does(cluster, jobs, preset, case):
    if case.name.startswith("every preset's"):
        preset = "dr_grpo"
    manifest = changed((*case.change, *entries_of(preset)))
    file, read = validate(manifest), read_back(cluster, jobs, manifest)
    assert resolve(read) == resolve(file)
    assert read == file
    set_by_hand = {"by_alias": True, "exclude_defaults": True, "mode": "json"}
    assert read.model_dump(**set_by_hand) == file.model_dump(**set_by_hand), "a hash of what is set would differ"


@pytest.mark.parametrize("preset", PRESETS)
def test_an_expanded_job_can_be_stored_and_is_the_same(cluster, jobs, preset):
    expanded = resolve(validate(changed((*entries_of(preset), "spec.evaluation={}"))))
    assert read_back(cluster, jobs, to_data(expanded)) == expanded


def test_kubectl_refuses_an_unknown_field_by_its_path(cluster, namespace):
    manifest = write_yaml(changed(("spec.trainer.optimizer.lr=1",)))
    with pytest.raises(RuntimeError, match=r'unknown field "spec\.trainer\.optimizer\.lr"'):
        cluster.kubectl("create", "-n", namespace, "-f", "-", stdin=manifest)


def test_two_appliers_of_one_list_keep_each_others_entries(cluster, namespace):
    job = changed(())
    path = f"{cluster.api.path(API, 'RLJob', namespace)}/sums"
    cluster.api.apply(path, job, "person")
    header = {key: job[key] for key in ("apiVersion", "kind", "metadata")}
    replicas = {"rollouts": [{"name": "main", "replicas": {"max": 3}}]}
    applied = cluster.api.apply(path, header | {"spec": replicas}, "autoscaler", force=False)
    assert applied["spec"]["rollouts"][0]["replicas"] == {"min": 1, "max": 3}
    again = cluster.api.apply(path, job, "person", force=False)
    assert again["spec"]["rollouts"][0]["replicas"] == {"min": 1, "max": 3}
    assert [task["name"] for task in again["spec"]["tasks"]] == ["sums"]


def test_a_job_of_a_hundred_kilobytes_is_accepted(cluster, jobs):
    job = changed(())
    task = job["spec"]["tasks"][0]
    job["spec"]["tasks"] = [task | {"name": f"t{i}", "prompt": "{question} " + "x" * 1600} for i in range(64)]
    assert len(json.dumps(job)) > 100_000
    cluster.api.post(jobs, job, **STRICT)


def test_a_job_as_large_as_every_bound_allows_is_checked_within_the_budget_of_a_request(cluster, jobs):
    """The API server limits the estimated cost of the rules in a CRD and also their actual cost in a request."""
    job = changed(())
    spec = job["spec"]
    reward = spec["rewards"][0]
    spec["rewards"] = [reward | {"name": f"r{i}".ljust(63, "x")} for i in range(64)]
    spec["rollouts"] = [{"name": f"p{i}".ljust(63, "x"), "replicas": {"min": 1, "max": 2}} for i in range(64)]
    spec["tasks"] = [
        {
            "name": f"t{i}".ljust(63, "x"),
            "data": {"reasoningGym": {"dataset": "chain_sum"}},
            "prompt": "{a}" * 1365,
            "reward": f"r{63 - i}".ljust(63, "x"),
        }
        for i in range(64)
    ]
    spec["evaluation"] = {"tasks": [task["name"] for task in spec["tasks"]]}
    created = cluster.api.post(jobs, job, **STRICT)
    created["spec"]["suspend"] = True
    cluster.api.put(f"{jobs}/sums", created, **STRICT)


NULLS = {"spec": {"securityContext": None, "containers": [{"name": "main", "resources": None}]}}


@pytest.mark.parametrize(
    ("how", "arrives"),
    [
        ("create", NULLS),
        ("apply --server-side", NULLS),
        ("apply", {"spec": {"containers": [{"name": "main"}]}}),  # kubectl removes nulls on the client side
    ],
)
def test_null_in_a_template_reaches_the_operator_unless_kubectl_applies_on_its_side(cluster, namespace, how, arrives):
    """Null in a template removes a value that rljob would set."""
    manifest = write_yaml(changed((f"spec.trainer.template={json.dumps(NULLS)}",)))
    cluster.kubectl(*how.split(), "-n", namespace, "-f", "-", stdin=manifest)
    stored = cluster.api.get(cluster.api.path(API, "RLJob", namespace, "sums"))
    assert stored["spec"]["trainer"]["template"] == arrives


def test_a_changed_file_is_applied_by_kubectl_again(cluster, namespace):
    for how in (("apply",), ("apply", "--server-side", "--force-conflicts")):
        for most in (2, 4):
            manifest = changed((f"spec.rollouts[0].replicas.max={most}", "metadata.name=again"))
            cluster.kubectl(*how, "-n", namespace, "-f", "-", stdin=write_yaml(manifest))
            stored = cluster.api.get(cluster.api.path(API, "RLJob", namespace, "again"))
            assert stored["spec"]["rollouts"][0]["replicas"]["max"] == most
    with pytest.raises(RuntimeError, match=r"spec\.seed: .*field is immutable; create a new RLJob"):
        manifest = changed(("spec.seed=9", "metadata.name=again"))
        cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=write_yaml(manifest))


def test_two_appliers_give_one_container_of_a_template_a_variable_each(cluster, namespace):
    job, path = changed(()), f"{cluster.api.path(API, 'RLJob', namespace)}/sums"
    cluster.api.apply(path, job, "person")
    header = {key: job[key] for key in ("apiVersion", "kind", "metadata")}

    def with_variable(name):
        container = {"name": "main", "env": [{"name": name, "value": "x"}]}
        return header | {"spec": {"runner": {"template": {"spec": {"containers": [container]}}}}}

    cluster.api.apply(path, with_variable("A"), "one", force=False)
    applied = cluster.api.apply(path, with_variable("B"), "other", force=False)
    [container] = applied["spec"]["runner"]["template"]["spec"]["containers"]
    assert [variable["name"] for variable in container["env"]] == ["A", "B"]
