"""Admission refuses exactly the RLJobs that would have the condition InvalidSpec, with the same sentences."""

import copy
from types import MappingProxyType, SimpleNamespace

import kopf
import pytest

from rljob.manifests.inputs import read_cluster
from rljob.operator import handlers
from rljob.operator.admission import new_problems
from rljob.operator.decoded_jobs import manifest_of
from rljob.operator.plan import Observed
from rljob.operator.planning import plan

from .world import CLUSTER, SPEC, World

PROFILES = read_cluster({"acceleratorProfiles": {"h100": {}}})
LOCAL = [{"name": "policy", "source": "/models/policy"}]
LOCAL_PROBLEM = "spec.models[0].source: '/models/policy' is a path of one machine"


def job(**spec):
    return {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "sums", "namespace": "default", "uid": "u", "managedFields": [{"manager": "kubectl"}]},
        "spec": {**copy.deepcopy(SPEC), **spec},
        "status": {"release": "1"},
    }


def condition(written):
    """Return the message of Ready=False InvalidSpec for an RLJob; empty if it has another reason."""
    manifest = manifest_of("sums", written["spec"])
    seen = World().observe()
    fields = {name: getattr(seen, name) for name in seen.__dataclass_fields__}
    made = plan(Observed(**{**fields, "job": manifest.job, "problems": manifest.problems}), CLUSTER)
    assert made.status is not None
    ready = next(each for each in made.status.conditions if each.type == "Ready")
    return ready.message if ready.reason == "InvalidSpec" else ""


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({}, ""),
        ({"models": LOCAL}, LOCAL_PROBLEM),
        ({"rollouts": [{"name": "main"}, {"name": "main-elastic"}]}, "is the name of the elastic engines of pool main"),
        (
            {"trainer": {"template": {"spec": {"hostNetwork": True}}}},
            "spec.trainer.template.spec.hostNetwork: governed",
        ),
        ({"training": {"steps": -1}}, "spec.training.steps: must be at least 0, not -1"),
        ({"seeds": 1}, "spec.seeds: unknown field; did you mean seed?"),
    ],
)
def test_a_refusal_has_the_sentences_of_the_condition(spec, sentence):
    found = new_problems(job(**spec), None)
    assert "; ".join(found) == condition(job(**spec))
    assert sentence in "; ".join(found) and bool(found) == bool(sentence)


def test_all_problems_are_in_one_refusal():
    broken = job(models=LOCAL, trainer={"template": {"spec": {"hostNetwork": True}}})
    assert len(new_problems(broken, None)) == 2


def test_an_update_is_refused_only_for_problems_that_it_adds():
    stored, more = job(models=LOCAL), job(models=LOCAL, trainer={"template": {"spec": {"hostNetwork": True}}})
    assert new_problems(job(models=LOCAL, suspend=True), stored) == []
    assert [found.partition(":")[0] for found in new_problems(more, stored)] == [
        "spec.trainer.template.spec.hostNetwork"
    ]
    assert new_problems(job(models=LOCAL), job())[0].startswith(LOCAL_PROBLEM)
    assert new_problems(job(), stored) == []


def test_an_rljob_of_another_controller_is_not_checked():
    assert not new_problems(job(models=LOCAL, managedBy="kueue.x-k8s.io/multikueue"), None)
    assert new_problems(job(models=LOCAL, managedBy="rljob.dev/operator"), None)


@pytest.mark.parametrize("spec", [None, [], "text"])
def test_an_rljob_without_a_spec_is_refused_without_a_failure(spec):
    assert new_problems({"metadata": {}, "spec": spec}, None)


def test_an_accelerator_profile_must_be_one_of_the_cluster():
    profiled = job(trainer={"accelerator": {"profile": "h200"}})
    (found,) = new_problems(profiled, None, PROFILES)
    assert found == "spec.trainer.accelerator.profile: the cluster has no profile h200; it has h100"
    assert condition(profiled).endswith("it has none (acceleratorProfiles of the chart)")
    assert not new_problems(job(trainer={"accelerator": {"profile": "h100"}}), None, PROFILES)
    assert not new_problems(profiled, profiled, PROFILES), "a profile that the cluster does not have any more"


async def test_the_handler_refuses_with_code_422():
    memo = SimpleNamespace(rljob=SimpleNamespace(operator=SimpleNamespace(cluster=PROFILES)))
    await handlers.validate(memo=memo, body=job(), old=None)
    with pytest.raises(kopf.AdmissionError, match="is a path of one machine") as refusal:
        await handlers.validate(memo=memo, body=MappingProxyType(job(models=LOCAL)), old=None)
    assert refusal.value.code == 422
    assert str(refusal.value) == condition(job(models=LOCAL))
