"""Elastic engines give their accelerators back to the gang of their job."""

import os
import random

import pytest
from msgspec.structs import force_setattr

from rljob.operator.planning.scale import GIVE_BACK_SECONDS
from rljob.operator.planning.starvation import STARVATION_SECONDS, TERMINATION_SECONDS
from rljob.operator.planning.timestamps import instant

from .world import World

POOL = "rollout-main"
ELASTIC = "sums-rollout-main-elastic"
FULL = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu. preemption: 0/2 nodes are available."


def replicas(world, name=ELASTIC):
    return world.children["Deployment", name].body["spec"]["replicas"]


def engines(world, load):
    """Have the coordinator report all engines with this load; 0: drained."""
    found = [{"name": pod.metadata.name, "load": load, "drained": not load} for pod in world.find("rollout-main")]
    world.tell(state="Running", engines=found)


@pytest.fixture
def world():
    """Two elastic engines are ready; the trainer has died, and its next attempt finds no accelerator."""
    made = World.with_elastic_engines(POOL)
    engines(made, 7)
    made.exit("trainer", 1)
    made.fail_job()
    made.settle()
    made.now += 2
    made.settle()
    made.make_pods()
    made.unschedulable(FULL, "sums-trainer-2")
    return made


def test_elastic_engines_are_drained_and_removed_for_a_trainer_without_accelerators(world):
    made = world.settle()
    assert replicas(world) == 2 and world.status.draining == [] and made.after == STARVATION_SECONDS
    world.now += STARVATION_SECONDS
    made = world.settle()
    assert len(world.status.draining) == 2 and replicas(world) == 2 and made.after == GIVE_BACK_SECONDS
    world.now += GIVE_BACK_SECONDS
    world.settle()
    assert replicas(world) == 0 and replicas(world, "sums-rollout-main") == 2, "the minimum belongs to the gang"
    world.make_pods()
    world.settle()
    assert world.status.draining == [] and world.role(POOL).desired == 2


def test_idle_engines_and_those_that_just_took_the_accelerators_are_removed_at_once(world):
    engines(world, 0)
    world.now += STARVATION_SECONDS
    world.settle()
    assert replicas(world) == 0


def test_the_engines_come_back_when_the_trainer_has_its_node(world):
    world.now += STARVATION_SECONDS + GIVE_BACK_SECONDS
    world.settle()
    world.now += GIVE_BACK_SECONDS
    world.settle()
    world.make_pods()
    assert replicas(world) == 0
    world.ready("sums-trainer-2")
    world.settle()
    assert replicas(world) == 2


def test_a_minimum_engine_gets_the_accelerator_of_an_elastic_one(world):
    world.ready("sums-trainer-2")
    engine = next(pod for pod in world.find("rollout-main") if "elastic" not in pod.metadata.name)
    world.unschedulable(FULL, engine.metadata.name)
    engines(world, 0)
    world.now += STARVATION_SECONDS
    world.settle()
    assert replicas(world) == 0


@pytest.mark.parametrize(
    "message",
    [
        "0/2 nodes are available: 2 node(s) had untolerated taint(s).",
        "pod has unbound immediate PersistentVolumeClaims",
    ],
)
def test_engines_stay_if_their_accelerators_would_not_help(world, message):
    world.unschedulable(message, "sums-trainer-2")
    world.now += 3600
    world.settle()
    assert replicas(world) == 2 and world.status.draining == []


def test_engines_stay_while_an_old_pod_of_the_gang_still_holds_its_accelerators(world):
    old = next(pod for pod in world.find("rollout-main") if "elastic" not in pod.metadata.name)
    force_setattr(old.metadata, "deletion_timestamp", instant(world.now))
    world.now += 3600
    world.settle()
    assert replicas(world) == 2


def test_a_pod_of_the_gang_that_stays_on_a_lost_node_holds_nothing_up(world):
    lost = next(pod for pod in world.find("rollout-main") if "elastic" not in pod.metadata.name)
    force_setattr(lost.metadata, "deletion_timestamp", instant(world.now + 30))
    made = world.settle()
    assert made.after == 30 + TERMINATION_SECONDS and world.status.draining == []
    world.now += 30 + TERMINATION_SECONDS
    world.settle()
    assert len(world.status.draining) == 2


@pytest.mark.parametrize("seed", range(50 if os.environ.get("RLJOB_THOROUGH") else 3))
def test_no_elastic_engine_outlasts_a_waiting_gang_by_a_minute(seed):
    """Random nodes, deaths and loads: one node of 8 accelerators, every pod takes one."""
    chosen = random.Random(seed)
    rollouts = [{"name": "main", "replicas": {"min": 2, "max": 9}}]
    world = World(trainer={"nodes": chosen.randint(1, 3)}, rollouts=rollouts, failurePolicy={"maxRestarts": 1000})
    world.settle()
    world.scale(POOL, chosen.randint(3, 9))
    bound, waits = set(), {}
    for _ in range(80):
        world.settle()
        world.make_pods()
        bound &= world.pods.keys()
        gpu = [pod for pod in world.find("trainer", "rollout-main") if pod.status.phase != "Failed"]
        chosen.shuffle(gpu)
        for pod in gpu:
            if pod.metadata.name not in bound and len(bound) < 8:
                bound.add(pod.metadata.name)
                world.ready(pod.metadata.name)
            elif pod.metadata.name not in bound and pod.status.phase == "Pending" and not pod.status.conditions:
                world.unschedulable(FULL, pod.metadata.name)
        engines(world, chosen.choice([0, 0, 9]))
        pending = {pod.metadata.name for pod in gpu if pod.metadata.labels["rljob.dev/tier"] == "gang"} - bound
        waits = {name: waits.get(name, world.now) for name in pending}
        elastic = [name for name in bound if "elastic" in name]
        late = [name for name, since in waits.items() if world.now - since > 60]
        assert not (late and elastic), f"{late} wait, {elastic} hold accelerators"
        if chosen.random() < 0.1 and "sums-trainer" in str(bound):
            victims = {name for name in bound if "trainer" in name}
            world.exit(next(iter(victims)), 1)
            world.fail_job()
            bound -= victims
        world.now += chosen.choice([1, 2, 5])
