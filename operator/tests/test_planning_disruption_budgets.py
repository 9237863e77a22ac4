"""A drain ends, also where no node has room for what takes the place of the pods that it evicts."""

import pytest

from rljob.operator.planning.scale import SCHEDULING_SECONDS

from .world import World

NO_ROOM = "0/1 nodes are available: 1 node(s) were unschedulable."


@pytest.fixture
def world():
    made = World(rollouts=[{"name": "main", "replicas": {"min": 3}}])
    made.run_up()
    return made


def bounds(world):
    return {
        name: child.body["spec"].get("maxUnavailable", child.body["spec"].get("minAvailable"))
        for (kind, name), child in world.children.items()
        if kind == "PodDisruptionBudget"
    }


def evict(world, name):
    """Have a pod evicted while its node is drained, and another one made that finds none."""
    del world.pods[name]
    world.make_pods()
    made = [pod for pod in world.find("rollout") if not pod.status.conditions]
    world.unschedulable(NO_ROOM, *[pod.metadata.name for pod in made])
    world.settle()
    world.now += SCHEDULING_SECONDS
    world.settle()


def test_pods_without_a_node_make_room_for_the_next_eviction(world):
    assert bounds(world) == {"sums-rollout-main": 1, "sums-reward-exact": 1}
    engines = [pod.metadata.name for pod in world.find("rollout")]
    for evicted, name in enumerate(engines, 1):
        evict(world, name)
        assert bounds(world) == {"sums-rollout-main": 1 + evicted, "sums-reward-exact": 1}


def test_a_pod_has_a_while_to_find_a_node_as_clusters_grow(world):
    engine = world.find("rollout")[0].metadata.name
    del world.pods[engine]
    world.make_pods()
    world.unschedulable(NO_ROOM, *[pod.metadata.name for pod in world.find("rollout") if not pod.status.conditions])
    assert world.settle().after == SCHEDULING_SECONDS
    world.now += SCHEDULING_SECONDS - 1
    world.settle()
    assert bounds(world)["sums-rollout-main"] == 1
    world.now += 1
    world.settle()
    assert bounds(world)["sums-rollout-main"] == 2


def test_the_budget_is_as_before_once_all_have_a_node(world):
    evict(world, world.find("rollout")[0].metadata.name)
    world.ready()
    world.settle()
    assert bounds(world)["sums-rollout-main"] == 1


def test_pods_that_are_being_started_hold_a_drain_up(world):
    world.waiting("ContainerCreating", "", "rollout")
    world.settle()
    assert bounds(world)["sums-rollout-main"] == 1


def test_a_trainer_that_is_not_to_be_disrupted_is_not_whatever_waits():
    world = World(failurePolicy={"disruption": "Block"})
    world.run_up()
    world.unschedulable(NO_ROOM, "trainer")
    world.settle()
    assert bounds(world)["sums-trainer"] == 2


def test_whether_a_trainer_may_be_disrupted_is_changed_while_it_runs():
    world = World()
    world.run_up()
    jobs = world.names("Job")
    world.change(failurePolicy={"disruption": "Block"})
    world.settle()
    assert bounds(world)["sums-trainer"] == 2
    world.change(failurePolicy={"disruption": "Allow"})
    world.settle()
    assert "sums-trainer" not in bounds(world)
    assert world.names("Job") == jobs  # nothing was restarted for it


def test_an_eviction_costs_the_trainer_no_restart(world):
    world.disrupt("trainer")
    world.exit("trainer", 143)
    world.fail_job(
        "PodFailurePolicy", "Pod default/sums-trainer-1-0 has condition DisruptionTarget matching FailJob rule"
    )
    world.settle()
    assert (world.status.trainer.number, world.status.trainer.charged) == (2, 0)
    assert "disrupted" in world.status.trainer.cause
