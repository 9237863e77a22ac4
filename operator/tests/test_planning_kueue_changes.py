"""Changes of a job in Kueue: an admission holds while the demands of its pods stay, a Workload that waits follows."""

from typing import Any

import pytest

from rljob.manifests.inputs import Cluster
from rljob.operator.planning import plan
from rljob.operator.planning.kueue_admission import PRIORITY_SECONDS

from .queued_world import FIXED, WORKLOAD, Queued, running_in_kueue
from .world import SPEC

RANKED = {"gang": {"provider": "kueue", "queue": "research"}, "priorityClassName": "high"}


def template(**container: Any) -> dict[str, Any]:
    return {"template": {"spec": {"containers": [{"name": "main", **container}]}}}


@pytest.mark.parametrize(
    "change",
    [
        {"training": {"steps": 4}},
        {"checkpoints": {"everySteps": 7}},
        {"tracking": {"tensorboard": False}},
        {"coordinator": template(env=[{"name": "A", "value": "b"}])},
        {"runner": template(image="runner:2")},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_change_that_demands_nothing_else_keeps_the_admission(change):
    world = running_in_kueue()
    before = world.children[WORKLOAD].metadata.uid
    pods = {name: world.children[name].metadata.generation for name in world.children}
    world.change(**change)
    world.settle()
    assert world.condition("Suspended") == ("", "", "") and world.children[WORKLOAD].metadata.uid == before
    assert any(world.children[name].metadata.generation > pods[name] for name in pods), "the change has an effect"


@pytest.mark.parametrize(
    "change",
    [
        {"coordinator": template(resources={"requests": {"cpu": "4"}})},
        {"trainer": {**SPEC["trainer"], "rdma": {"resource": "rdma/hca"}}},
        {"rollouts": [{**FIXED[0], "template": {"spec": {"nodeSelector": {"disk": "large"}}}}]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_change_of_what_pods_demand_queues_the_job_again(change):
    world = running_in_kueue()
    world.change(**change)
    world.settle()
    assert world.why == "Suspending" and "was admitted for other pods" in world.condition("Ready")[2]


def test_quota_that_is_reserved_for_other_pods_is_given_back_before_the_admission():
    world = Queued()
    world.settle()
    world.say(QuotaReserved=("True", "QuotaReserved", "Quota reserved"))
    before = world.children[WORKLOAD].metadata.uid
    world.change(rollouts=[{"name": "main", "replicas": {"min": 3}}])
    world.settle()
    assert world.children[WORKLOAD].metadata.uid != before
    assert world.workload["spec"]["podSets"][-1]["count"] == 3 and world.why == "Queued"


def test_a_workload_that_waits_follows_the_value_of_its_priority_class():
    world = Queued(scheduling=RANKED)
    world.priority = 7
    made = world.settle()
    assert world.workload["spec"]["priority"] == 7
    assert made.after is not None and made.after <= PRIORITY_SECONDS, "no event tells of a new value"
    world.priority = 9
    world.settle()
    assert world.workload["spec"]["priority"] == 9
    world.say(QuotaReserved=("True", "QuotaReserved", "Quota reserved"))
    world.priority = 11
    world.settle()
    assert world.workload["spec"]["priority"] == 9, "a reserved Workload is not changed"


def test_a_workload_that_waits_follows_the_requests_of_the_cluster_and_an_admitted_one_does_not():
    world, more = Queued(), Cluster(requests_per_gpu={"cpu": "9", "memory": "9Gi"})

    def requested() -> str:
        sets = {each["name"]: each for each in world.workload["spec"]["podSets"]}
        return str(sets["trainer"]["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"])

    world.settle()
    assert requested() == "2"
    world.do(plan(world.observe(), more))
    assert requested() == "9"
    world.admit()
    world.do(plan(world.observe(), Cluster()))
    assert requested() == "9" and world.names("StatefulSet") == ["sums-coordinator"], "it is admitted nevertheless"


def test_a_workload_that_waits_again_after_an_eviction_follows_the_manifest():
    world = running_in_kueue()
    world.evict()
    world.settle()
    world.tell(state="Suspended")
    world.settle()
    world.change(runner=template(resources={"requests": {"cpu": "3"}}))
    world.settle()
    sets = {each["name"]: each for each in world.workload["spec"]["podSets"]}
    assert sets["runner"]["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"] == "3"
    world.admit()
    world.settle()
    assert world.condition("Suspended")[:2] == ("False", "Resumed")
