"""Gangs that a scheduler places as a whole: their pods are created together, and their PodGroup follows them."""

from typing import Any

from .world import World

GROUP = "PodGroup.scheduling.k8s.io"
FULL = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu. preemption: 0/2 nodes are available."
OTHERS = "waiting for minCount pods from a gang to be scheduled"
ENGINES, ELASTIC = "sums-rollout-main", "sums-rollout-main-elastic"
SCALED = [{"name": "main", "replicas": {"min": 2, "max": 4}}]


def gang(provider: str = "kubernetes", **spec: Any) -> World:
    return World(scheduling={"gang": {"provider": provider}}, rollouts=SCALED, **spec)


def replicas(world: World, name: str) -> int:
    return world.children["Deployment", name].body["spec"]["replicas"]


def test_engines_are_created_with_the_gang_and_the_trainer_after_them():
    world = gang(trainer={"nodes": 1})
    world.settle()
    assert replicas(world, ENGINES) == 2 and replicas(world, ELASTIC) == 0
    assert world.names("Job") == [], "the last pod of a gang is tried first: it must be the trainer's"
    assert world.children[GROUP, "sums-gang"].body["spec"] == {"schedulingPolicy": {"gang": {"minCount": 3}}}
    world.make_pods()
    world.settle()
    assert world.names("Job") == ["sums-trainer-1"]


def test_a_suspended_job_has_no_pod_group():
    world = gang(suspendGraceSeconds=1)
    world.run_up()
    world.change(suspend=True)
    world.tell(state="Suspended")
    world.settle()
    assert world.condition("Suspended")[0] == "True" and (GROUP, "sums-gang") not in world.children
    assert world.status.gang_provider is None
