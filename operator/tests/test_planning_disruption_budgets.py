"""A node drain ends even if no node has room for the replacements of the evicted pods."""

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
    """Evict a pod, as a node drain does, and create a replacement that is unschedulable."""
    del world.pods[name]
    world.make_pods()
    made = [pod for pod in world.find("rollout") if not pod.status.conditions]
    world.unschedulable(NO_ROOM, *[pod.metadata.name for pod in made])
    world.settle()
    world.now += SCHEDULING_SECONDS
    world.settle()


def test_unschedulable_pods_allow_the_next_eviction(world):
    assert bounds(world) == {"sums-rollout-main": 1, "sums-reward-exact": 1}
    engines = [pod.metadata.name for pod in world.find("rollout")]
    for evicted, name in enumerate(engines, 1):
        evict(world, name)
        assert bounds(world) == {"sums-rollout-main": 1 + evicted, "sums-reward-exact": 1}


def test_a_pending_pod_counts_until_an_autoscaler_had_time_to_add_a_node(world):
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


def test_the_budget_is_restored_when_all_pods_are_scheduled(world):
    evict(world, world.find("rollout")[0].metadata.name)
    world.ready()
    world.settle()
    assert bounds(world)["sums-rollout-main"] == 1


def test_starting_pods_block_a_node_drain(world):
    world.waiting("ContainerCreating", "", "rollout")
    world.settle()
    assert bounds(world)["sums-rollout-main"] == 1


def test_a_trainer_with_disruption_block_is_never_evicted():
    world = World(failurePolicy={"disruption": "Block"})
    world.run_up()
    world.unschedulable(NO_ROOM, "trainer")
    world.settle()
    assert bounds(world)["sums-trainer"] == 2


def test_the_disruption_policy_of_a_running_trainer_can_be_changed():
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
