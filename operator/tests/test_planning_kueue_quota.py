"""A job in Kueue gives its quota back when its pods are gone: not earlier, and also if some of them are lost."""

from collections.abc import Callable

import pytest

from rljob.manifests.pods import GRACE_SECONDS
from rljob.operator.planning.lost_nodes import LOST_SECONDS
from rljob.operator.planning.suspension import DEFAULT_GRACE_SECONDS

from .queued_world import WORKLOAD, Queued, running_in_kueue


def evict(world: Queued) -> None:
    world.evict()
    world.settle()
    world.tell(state="Suspended")


def suspend(world: Queued) -> None:
    world.change(suspend=True)
    world.tell(state="Suspended")


def succeed(world: Queued) -> None:
    world.tell(state="Succeeded")


def holds_quota(world: Queued) -> bool:
    return WORKLOAD in world.children and world.kueue_says("QuotaReserved")[0] == "True"


@pytest.mark.parametrize("stop", [evict, suspend, succeed])
def test_a_pod_on_a_lost_node_keeps_the_quota_until_it_counts_as_lost(stop: Callable[[Queued], None]):
    world = running_in_kueue()
    stop(world)
    world.lose("sums-trainer")
    made = world.settle()
    assert [pod for pod in world.find() if "coordinator" not in pod.metadata.name] == world.find("sums-trainer")
    assert holds_quota(world) and made.after == GRACE_SECONDS + LOST_SECONDS
    world.now += GRACE_SECONDS + LOST_SECONDS
    world.settle()
    assert world.find("sums-trainer") and not holds_quota(world)


def test_an_evicted_job_with_a_lost_pod_waits_in_its_queue_and_continues():
    world = running_in_kueue()
    evict(world)
    world.lose("sums-trainer")
    world.settle()
    world.now += GRACE_SECONDS + LOST_SECONDS
    world.settle()
    assert world.condition("Suspended")[0] == "True" and world.why == "Queued"
    world.admit()
    world.settle()
    assert world.condition("Suspended")[:2] == ("False", "Resumed") and world.names("StatefulSet")


def reject(world: Queued) -> None:
    world.problems = ["spec.training.steps: must be at least 1"]


def reject_by_the_cluster(world: Queued) -> None:
    world.change(trainer={"nodes": 2, "accelerator": {"profile": "h100"}})


@pytest.mark.parametrize("spoil", [reject, reject_by_the_cluster])
def test_a_job_with_a_rejected_spec_stops_when_it_is_evicted(spoil: Callable[[Queued], None]):
    world = running_in_kueue()
    spoil(world)
    world.settle()
    assert world.why == "InvalidSpec" and world.find("sums-trainer"), "pods are left unchanged"
    world.evict()
    made = world.settle()
    assert world.status.evicted_at and made.after == DEFAULT_GRACE_SECONDS and holds_quota(world)
    assert world.condition("Suspended")[:2] == ("False", "Suspending") and world.names("Job")
    assert world.why == "InvalidSpec" and world.condition("Stalled")[0] == "True", "a user must still correct the spec"
    assert "Kueue has evicted Workload sums-gang: Preempted" in world.condition("Ready")[2]
    world.tell(state="Suspended")
    world.settle()
    assert not world.pods and WORKLOAD not in world.children
    assert world.condition("Suspended")[:2] == ("True", "Suspended") and world.why == "InvalidSpec"
    world.problems = []
    world.change(trainer={"nodes": 2})
    world.settle()
    assert world.why == "Queued"
    world.admit()
    world.settle()
    assert world.condition("Suspended")[:2] == ("False", "Resumed") and world.status.evicted_at is None


def test_a_job_with_a_rejected_spec_stops_without_an_answer_after_its_own_grace_period():
    world = running_in_kueue()
    world.change(suspendGraceSeconds=7)
    reject_by_the_cluster(world)
    world.evict()
    assert world.settle().after == 7
    world.now += 7
    world.settle()
    assert not world.pods and WORKLOAD not in world.children


def test_a_job_with_a_rejected_spec_stops_when_its_workload_is_deleted():
    world = running_in_kueue()
    reject(world)
    world.remove(WORKLOAD)
    world.settle()
    assert "Workload sums-gang was deleted" in world.condition("Ready")[2]
    world.tell(state="Suspended")
    world.settle()
    assert not world.pods and world.why == "InvalidSpec"


def test_a_job_with_a_rejected_spec_that_waits_keeps_its_workload():
    world = Queued()
    world.settle()
    reject(world)
    world.settle()
    assert WORKLOAD in world.children and world.condition("Suspended") == ("", "", "")
