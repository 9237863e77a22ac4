"""A job in Kueue gives its quota back when its pods are gone: not earlier, and also if some of them are lost."""

from collections.abc import Callable

import pytest

from rljob.manifests.pods import GRACE_SECONDS
from rljob.operator.planning.lost_nodes import LOST_SECONDS

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
