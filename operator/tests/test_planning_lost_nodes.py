"""Pods on lost nodes: the coordinator's is deleted without its kubelet, the trainer gets its next attempt."""

from msgspec.structs import force_setattr

from rljob.manifests.pods import GRACE_SECONDS
from rljob.manifests.resources import LOST_NODE_SECONDS
from rljob.operator.planning.lost_nodes import LOST_SECONDS
from rljob.operator.planning.timestamps import instant

from .world import World

NOT_READY_SECONDS = 50
"""Until Kubernetes declares a silent node lost: --node-monitor-grace-period."""


def lose(world, name):
    """Have the node of pods go silent and their eviction begin; return the pods."""
    world.now += NOT_READY_SECONDS + LOST_NODE_SECONDS
    found = world.find(name)
    for pod in found:
        force_setattr(pod.metadata, "deletion_timestamp", instant(world.now + GRACE_SECONDS))
    return found


def test_a_coordinator_on_a_lost_node_is_deleted_within_two_minutes():
    world = World()
    world.run_up()
    began = world.now
    (pod,) = lose(world, "coordinator")
    made = world.plan()
    assert made.deletions == [] and made.after == GRACE_SECONDS + LOST_SECONDS
    world.now += made.after
    assert world.plan().deletions == [(("Pod", pod.metadata.name), pod.metadata.uid)]
    assert world.now - began < 120


def test_a_trainer_on_a_lost_node_gets_its_next_attempt_within_two_minutes():
    world = World()
    world.run_up()
    began = world.now
    lose(world, "trainer")
    world.now += world.plan().after
    assert not any(kind == "Pod" for (kind, _), _ in world.plan().deletions)
    world.settle()
    assert world.names("Job") == ["sums-trainer-2"] and world.now - began < 120


def test_a_coordinator_that_ends_in_its_grace_period_is_not_deleted():
    world = World()
    world.run_up()
    (pod,) = lose(world, "coordinator")
    force_setattr(pod.status, "phase", "Failed")
    world.now += 3600
    assert world.plan().deletions == []
