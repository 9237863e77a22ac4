"""Rendering is deterministic, and a role's hash depends only on the fields that its pods depend on."""

import copy

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from core.tests.manifests import MANIFEST
from core.tests.test_api_properties import overrides_of
from rljob.api.errors import ManifestError
from rljob.api.load import loads, validate
from rljob.api.yaml_loader import write_yaml
from rljob.manifests import render, spec_hash
from rljob.manifests.accelerator_profiles import unknown_profiles
from rljob.manifests.inputs import Cluster, RenderTarget
from rljob.manifests.names import LABEL_LIMIT, NAME_LIMIT, bounded

EXAMPLES = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
POD = {"spec": {"containers": [{"name": "main", "env": [{"name": "MINE", "value": "1"}]}]}}

NO_PODS_DEPEND = {
    "suspend": True,
    "suspendGraceSeconds": 5,
    "failurePolicy": {"maxRestarts": 1, "hangSeconds": 5, "pendingSeconds": 5},
    "activeDeadlineSeconds": 5,
    "ttlSecondsAfterFinished": 5,
    "keepCoordinatorSeconds": 5,
    "managedBy": "example.com/other",
    "storage": {"retention": "Delete"},
    "runner": {"replicas": {"min": 2, "max": 3}},
}
TEMPLATES = {
    "initializer": ("initializer", {**MANIFEST["spec"]["initializer"], "template": POD}),
    "coordinator": ("coordinator", {"template": POD}),
    "runner": ("runner", {"template": POD}),
    "trainer": ("trainer", {"template": POD}),
    "rollout-main": ("rollouts", [{"name": "main", "template": POD}]),
    "reward-exact": ("rewards", [{"name": "exact", "builtin": "reasoning_gym", "template": POD}]),
}
COORDINATOR_READS = {
    "checkpoints": {"everySteps": 1},
    "tracking": {"tensorboard": False},
    "training": {"steps": 4},
}


def hashes(changes=None, context=None):
    manifest = copy.deepcopy(MANIFEST)
    manifest["spec"] |= changes or {}
    return {role.name: role.hash for role in render(validate(manifest), context or RenderTarget(uid="u"))}


def differing(changes):
    before, after = hashes(), hashes(changes)
    assert before.keys() == after.keys()
    return {name for name in before if before[name] != after[name]}


@pytest.mark.parametrize("field", NO_PODS_DEPEND)
def test_a_change_that_no_pod_depends_on_restarts_no_pod(field):
    assert differing({field: NO_PODS_DEPEND[field]}) == set()


def test_replicas_restart_nothing():
    changes = {
        "rollouts": [{"name": "main", "replicas": {"min": 2, "max": 4}}],
        "rewards": [{"name": "exact", "builtin": "reasoning_gym", "replicas": {"min": 2, "max": 4}}],
    }
    assert differing(changes) == set()
    assert hashes(changes) == hashes(changes, RenderTarget(uid="u", replicas={"rollout-main": 3, "reward-exact": 4}))


def test_network_policies_are_their_own_role():
    assert differing({"network": {"policy": "Disabled"}}) == {"network"}


@pytest.mark.parametrize("role", TEMPLATES)
def test_a_template_restarts_only_its_role(role):
    field, value = TEMPLATES[role]
    # The initializer inherits from the trainer's template. A completed initializer does not run again.
    assert differing({field: value}) == ({role, "initializer"} if role == "trainer" else {role})


def test_the_initializer_depends_only_on_the_inherited_fields_of_the_trainers_template():
    assert differing({"trainer": {"template": {"spec": {"nodeSelector": {"zone": "a"}}}}}) == {"trainer"}


@pytest.mark.parametrize("field", COORDINATOR_READS)
def test_a_field_of_the_coordinator_restarts_only_the_coordinator(field):
    assert differing({field: COORDINATOR_READS[field]}) == {"coordinator", "config"}


def test_an_immutable_field_is_part_of_every_hash():
    assert differing({"seed": 5}) == set(hashes())


def test_neither_cluster_settings_nor_the_attempt_are_part_of_a_hash():
    other = Cluster(images=dict.fromkeys(Cluster().images, "other:2"), accelerator="cpu", storage_class="fast")
    assert hashes() == hashes(context=RenderTarget(other, "elsewhere", "another", attempt=5))


def test_an_expanded_preset_changes_hashes_because_presets_may_change():
    assert differing({"algorithm": {"clipLow": 0.2}}) != set()


def test_an_explicit_default_does_not_change_hashes():
    assert (
        differing({"weightSync": {"inFlight": "keep"}, "suspend": False, "runner": {"replicas": {"min": 1}}}) == set()
    )


def test_the_hash_of_a_retained_claim_covers_the_immutable_fields():
    def of(changes):
        manifest = copy.deepcopy(MANIFEST)
        manifest["spec"] |= changes
        return spec_hash(validate(manifest))

    for changes in (NO_PODS_DEPEND, COORDINATOR_READS, dict(TEMPLATES.values()), {"network": {"policy": "Disabled"}}):
        assert of(changes) == of({})
    assert of({"seed": 5}) != of({})
    assert of({"initializer": {"command": ["other"]}}) != of({})


@EXAMPLES
@given(overrides=overrides_of(None))
def test_rendering_any_job_twice_gives_the_same(manifest, overrides):
    try:
        job, again = loads(write_yaml(manifest), overrides), loads(write_yaml(manifest), overrides)
    except ManifestError:
        assume(False)
    assume(not list(unknown_profiles(job, {})))  # such a job is not rendered
    context = RenderTarget(uid="0f1e2d3c", attempt=2)
    first = render(job, context)
    assert first == render(again, context)
    names = [(o["kind"], o["metadata"]["name"]) for role in first for o in role.objects]
    assert len(names) == len(set(names))
    assert len({role.name for role in first}) == len(first)


@given(st.text("abc-", min_size=1, max_size=200), st.text("abc-", min_size=1, max_size=200))
def test_cut_names_are_unique(one, other):
    assume(one != other)
    assert bounded(one) != bounded(other)
    assert max(len(bounded(one)), len(bounded(other))) <= NAME_LIMIT
    assert len(bounded(one, LABEL_LIMIT)) <= LABEL_LIMIT
