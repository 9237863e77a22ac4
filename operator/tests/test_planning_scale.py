"""Replicas: bounds, and engines that are drained before they go."""

import pytest
from msgspec.structs import replace

from .world import World

POOL = "rollout-main"
KEPT_DEPLOYMENTS = ["sums-reward-exact", "sums-rollout-main", "sums-runner"]


@pytest.fixture
def world():
    return World.with_elastic_engines(POOL)


def replicas(world, name="sums-rollout-main-elastic"):
    return world.children["Deployment", name].body["spec"]["replicas"]


def engines(world, **loads):
    """Have the coordinator report all engines, with the load of some; -1: drained."""
    reported = []
    for i, pod in enumerate(world.find("rollout-main-elastic")):
        load = loads.get(f"e{i}", 5)
        reported.append({"name": pod.metadata.name, "load": max(0, load), "drained": load < 0})
    world.tell(state="Running", engines=reported)


def test_replicas_between_the_bounds_are_followed(world):
    assert replicas(world) == 2
    assert replicas(world, "sums-rollout-main") == 2
    assert world.role(POOL).desired == 4
    assert world.status.ready.rollout == "4/4"


@pytest.mark.parametrize(("requested", "gang", "elastic"), [(0, 2, 0), (1, 2, 0), (3, 2, 1), (99, 2, 2)])
def test_replicas_beyond_the_bounds_are_not_followed(requested, gang, elastic):
    world = World()
    world.run_up()
    world.scale(POOL, requested)
    world.settle()
    assert (replicas(world, "sums-rollout-main"), replicas(world)) == (gang, elastic)


def test_the_scale_status_has_replicas_and_selector(world):
    scale = next(each for each in world.decide().desired if each["kind"] == "RLJobScale")
    assert scale["status"] == {"replicas": 4, "selector": "rljob.dev/job=sums,rljob.dev/role=rollout-main"}


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        (9, "9 replicas are outside the range of role rollout-main in the RLJob: its maximum, 4, applies"),
        (1, "1 replicas are outside the range of role rollout-main in the RLJob: its minimum, 2, applies"),
        (3, None),
    ],
)
def test_the_status_of_a_scale_says_which_bound_applies(requested, message):
    world = World()
    world.run_up()
    world.scale(POOL, requested)

    def written():
        return next(each for each in world.decide().desired if each["kind"] == "RLJobScale")["status"].get("message")

    assert written() == message
    world.children["RLJobScale", "sums-rollout-main"].body["status"] = {"message": message} if message else {}
    world.scale(POOL, 3)
    assert written() == ("" if message else None), "it is removed when the number is in the range again"


def test_a_scale_without_pods_has_no_status():
    world = World()
    world.settle()
    assert "status" not in next(each for each in world.decide().desired if each["kind"] == "RLJobScale")


def test_an_engine_is_drained_before_it_is_removed(world):
    engines(world)
    world.scale(POOL, 3)
    made = world.settle()
    assert replicas(world) == 2
    assert len(world.status.draining) == 1
    assert made.after == 60
    name = world.status.draining[0]
    drained = {f"e{i}": -1 for i, pod in enumerate(world.find("elastic")) if pod.metadata.name == name}
    engines(world, **drained)
    made = world.plan()
    assert made.pod_costs == {name: -1000}
    assert replicas(world) == 1
    assert world.status.draining == [name]  # until it is deleted, so that it gets no requests
    world.make_pods()
    assert name not in world.pods
    world.settle()
    assert world.status.draining == []
    assert world.status.draining_since is None


def test_the_engine_with_the_lowest_load_is_removed(world):
    engines(world, e0=3, e1=9)
    world.scale(POOL, 3)
    world.settle()
    assert world.status.draining == [world.find("elastic")[0].metadata.name]


def test_an_engine_that_is_not_ready_is_removed_first_and_at_once(world):
    engines(world, e0=0, e1=0)
    name = world.find("elastic")[1].metadata.name
    world.waiting("ContainerCreating", "", name)
    world.scale(POOL, 3)
    made = world.plan()
    assert made.pod_costs == {name: -1000}
    assert replicas(world) == 1


def test_an_engine_that_the_coordinator_does_not_know_is_idle(world):
    world.tell(state="Running", engines=[])
    world.scale(POOL, 2)
    world.plan()
    assert replicas(world) == 0


def test_a_pod_that_was_evicted_is_not_drained(world):
    engines(world)
    pod = world.find("elastic")[0]
    world.exit(pod.metadata.name, 137)
    world.pods["another"] = replace(
        world.find("elastic")[1], metadata=replace(world.find("elastic")[1].metadata, name="another")
    )
    world.settle()
    assert world.status.draining == []


def test_an_engine_that_never_drains_is_removed_after_the_time_limit(world):
    engines(world)
    world.scale(POOL, 2)
    world.settle()
    world.now += 59
    world.settle()
    assert replicas(world) == 2
    world.now += 1
    world.plan()
    assert replicas(world) == 0


def test_scaling_up_keeps_draining_engines(world):
    engines(world)
    world.scale(POOL, 2)
    world.settle()
    assert len(world.status.draining) == 2
    world.scale(POOL, 4)
    world.settle()
    assert world.status.draining == []
    assert replicas(world) == 2


def test_scaling_down_further_keeps_the_chosen_engines(world):
    engines(world, e0=3, e1=2)
    world.scale(POOL, 3)
    world.settle()
    first = world.status.draining
    engines(world, e0=1, e1=9)
    world.scale(POOL, 2)
    world.settle()
    assert world.status.draining[:1] == first
    assert len(world.status.draining) == 2


def test_a_suspended_job_drains_no_engines(world):
    engines(world)
    world.scale(POOL, 2)
    world.settle()
    world.change(suspend=True)
    world.settle()
    assert world.status.draining == []


@pytest.mark.parametrize("requested", [4, 3])
def test_a_pool_without_elastic_replicas_drains_and_removes_its_elastic_engines(world, requested):
    engines(world)
    world.scale(POOL, requested)
    world.settle()
    world.change(rollouts=[{"name": "main", "replicas": {"min": 2}}])
    made = world.settle()
    elastic = sorted(pod.metadata.name for pod in world.find("elastic"))
    assert sorted(world.status.draining) == elastic
    assert len(elastic) == 2
    assert made.after == 60
    assert world.names("Deployment") == [*KEPT_DEPLOYMENTS[:2], "sums-rollout-main-elastic", KEPT_DEPLOYMENTS[2]]
    engines(world, e0=-1, e1=-1)
    pods = dict(world.pods)
    world.plan()
    assert world.names("Deployment") == KEPT_DEPLOYMENTS
    assert world.names("RLJobScale") == []
    world.pods, gone = pods, world.pods
    world.plan()
    assert sorted(world.status.draining) == elastic  # they get no requests while they terminate
    world.pods = gone
    world.settle()
    assert world.status.draining == []


def test_draining_of_a_removed_deployment_has_a_time_limit(world):
    engines(world)
    world.change(rollouts=[{"name": "main", "replicas": {"min": 2}}])
    world.settle()
    world.now += 60
    world.settle()
    assert world.names("Deployment") == KEPT_DEPLOYMENTS


def test_an_engine_that_is_kept_has_the_default_deletion_cost(world):
    engines(world)
    world.scale(POOL, 3)
    world.settle()
    name = world.status.draining[0]
    engines(world, e0=-1, e1=-1)
    world.plan()
    assert world.costs == {name: -1000}
    world.scale(POOL, 4)  # before the ReplicaSet has removed it
    world.settle()
    assert world.costs == {name: 0}
    assert world.decide().pod_costs == {}


def test_replaced_pods_do_not_extend_draining(world):
    engines(world)
    world.scale(POOL, 3)
    world.settle()
    for _ in range(2):
        world.now += 30
        assert replicas(world) == 2
        del world.pods[world.status.draining[0]]
        world.make_pods()
        world.ready()
        engines(world)
        world.plan()
    assert replicas(world) == 1


def test_an_additional_draining_engine_has_the_full_time_limit(world):
    engines(world)
    world.scale(POOL, 3)
    world.settle()
    world.now += 59
    world.scale(POOL, 2)
    assert world.settle().after == 60
    assert replicas(world) == 2


def test_a_missing_scale_removes_no_engine(world):
    engines(world)
    scale = world.children.pop(("RLJobScale", "sums-rollout-main"))
    made = world.plan()
    assert world.status.draining == []
    assert replicas(world) == 2
    again = next(each for each in made.desired if each["kind"] == "RLJobScale")
    assert again["spec"] == scale.body["spec"] | {"replicas": 4}  # a deleted scale is created with its replicas
    world.settle()
    assert replicas(world) == 2


def test_a_job_stays_ready_while_more_engines_start():
    world = World()
    world.run_up()
    world.events.clear()
    world.scale(POOL, 4)
    elastic = world.children["Deployment", "sums-rollout-main-elastic"]

    def continues():
        world.settle()
        return world.condition("Ready")[:2] == ("True", "Running") and world.events == []

    assert continues()
    assert elastic.body["status"]["observedGeneration"] < elastic.metadata.generation
    world._settle_workload(elastic)
    elastic.body["status"].update(replicas=0, updatedReplicas=0)
    assert continues()
    elastic.body["status"].update(replicas=2, updatedReplicas=0)  # a controller may write this meanwhile
    world.make_pods()
    assert continues()
    world.unschedulable("0/4 nodes are available: 4 Insufficient nvidia.com/gpu.", "elastic")
    assert continues()
    world.waiting("ErrImagePull", "not found", "elastic")
    assert continues()
    world.waiting("CrashLoopBackOff", "", "elastic")
    assert continues()
    world.ready()
    assert continues()
    assert world.role(POOL).ready == 4


def test_a_reward_is_scaled_without_draining():
    world = World(rewards=[{"name": "exact", "builtin": "reasoning_gym", "replicas": {"min": 1, "max": 5}}])
    world.run_up()
    world.scale("reward-exact", 5)
    world.settle()
    assert replicas(world, "sums-reward-exact") == 5
    world.scale("reward-exact", 1)
    world.settle()
    assert replicas(world, "sums-reward-exact") == 1


def test_a_clock_set_back_restarts_the_wait_for_engines(world):
    engines(world)
    world.scale(POOL, 2)
    world.settle()
    world.now -= 7200
    assert world.settle().after == 60
    world.now += 60
    world.settle()
    assert replicas(world) == 0
