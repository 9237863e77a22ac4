"""The trainer gets its nodes before engines are started, so that a job that fits exactly never waits for itself."""

import random

import pytest

from .world import World

FULL = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
POOL, ELASTIC = "sums-rollout-main", "sums-rollout-main-elastic"


def replicas(world, name=POOL):
    return world.children["Deployment", name].body["spec"]["replicas"]


def test_engines_start_when_all_pods_of_the_trainer_have_a_node_and_need_not_be_ready():
    world = World()
    world.settle()
    world.make_pods()
    trainer = [pod.metadata.name for pod in world.find("trainer-")]
    assert len(trainer) == 2 and not world.find(POOL) and replicas(world) == 0
    world.waiting("ContainerCreating", "", trainer[0])
    world.unschedulable(FULL, trainer[1])
    world.settle()
    assert replicas(world) == 0 and world.why == "PodsPending"
    world.waiting("ContainerCreating", "", trainer[1])
    world.settle()
    assert (replicas(world), replicas(world, ELASTIC)) == (2, 0)


def test_running_engines_stay_but_none_is_added_while_the_trainer_has_no_node():
    world = World()
    world.run_up()
    world.exit("trainer-", 1)
    world.fail_job()
    world.scale("rollout-main", 4)
    world.settle()
    assert (replicas(world), replicas(world, ELASTIC)) == (2, 0)
    world.now += 10
    world.settle()
    world.make_pods()
    world.ready("trainer-2")
    world.settle()
    assert (replicas(world), replicas(world, ELASTIC)) == (2, 2)


def test_a_resumed_job_starts_with_its_trainer_too():
    world = World()
    world.run_up()
    world.change(suspend=True)
    world.tell(state="Suspended")
    world.settle()
    world.make_pods()
    world.change(suspend=False)
    world.settle()
    assert replicas(world) == 0


def schedule(world, nodes, chosen):
    """Bind pending pods as kube-scheduler does: in random order, each to the node with the most free accelerators.

    Args:
        nodes: free accelerators of each node.
    """
    pending = [pod for pod in world.find("trainer-", POOL) if not pod.status.conditions]
    chosen.shuffle(pending)
    for pod in pending:
        needed = 8 if "trainer" in pod.metadata.name else 1
        node = max(range(len(nodes)), key=nodes.__getitem__)
        if nodes[node] >= needed:
            nodes[node] -= needed
            world.ready(pod.metadata.name)


@pytest.mark.parametrize("seed", range(5))
def test_a_job_of_eight_and_eight_accelerators_fits_on_two_nodes_of_eight(seed):
    world = World(trainer={"processesPerNode": 8}, rollouts=[{"name": "main", "replicas": {"min": 8}}])
    nodes, chosen = [8, 8], random.Random(seed)
    for _ in range(3):
        world.settle()
        world.make_pods()
        schedule(world, nodes, chosen)
    assert nodes == [0, 0]
    world.ready()
    world.tell(state="Running")
    world.settle()
    assert world.why == "Running"
