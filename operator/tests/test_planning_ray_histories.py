"""Invariants of engines that span hosts, for random sequences of events."""

from __future__ import annotations

import copy
from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rljob.operator.api_types import Pod
from rljob.operator.plan import Plan
from rljob.operator.planning.timestamps import instant

from .world import World, put

POOL, HOSTS = "rollout-main", 2
LEAST, MOST = 2, 4


def pool(zone: str) -> list[dict[str, object]]:
    template = {"spec": {"nodeSelector": {"zone": zone}}}
    replicas = {"min": LEAST, "max": MOST}
    return [{"name": "main", "hosts": HOSTS, "parallelism": {"tensor": 4}, "replicas": replicas, "template": template}]


class RayHistories(RuleBasedStateMachine):
    """Random deaths of pods, scales, loads and changes; KubeRay and the garbage collector act late."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(rollouts=pool("a"), failurePolicy={"maxRestarts": 10_000})
        self.orphans: dict[str, Pod] = {}
        """Pods of deleted RayClusters that the garbage collector has not deleted."""

    @initialize()
    def begins(self) -> None:
        self.world.run_up()
        self.world.provisioned()

    # the operator

    @rule()
    def plans(self) -> None:
        self.plan()

    def plan(self) -> Plan:
        """Plan and execute once."""
        world = self.world
        made = world.decide()
        before = {name: pod for name, pod in world.pods.items() if "ray.io/cluster" in pod.metadata.labels}
        self.check(made)
        world.do(made)
        left = {name: pod for name, pod in before.items() if name not in world.pods}
        self.orphans |= left
        world.pods |= left
        return made

    def check(self, made: Plan) -> None:
        """Check a plan against what is there."""
        world = self.world
        desired = [each["metadata"]["name"] for each in made.desired if each["kind"] == "RayCluster"]
        deleted = {name for (kind, name), _ in made.deletions if kind == "RayCluster"}
        present = set(world.names("RayCluster"))
        assert max(Counter(desired).values(), default=0) <= 1, "every engine has a name of its own"
        assert not deleted & set(desired)
        assert deleted <= present
        used = {pod.metadata.labels.get("ray.io/cluster") for pod in world.find()} | present
        created = set(desired) - present
        assert not created & used, "a name of which something is left is not used again"
        assert len((present - deleted) | created) <= MOST + len(made.status.draining if made.status else ())

    # a user, the coordinator

    @rule(replicas=st.integers(LEAST, MOST))
    def scales(self, replicas: int) -> None:
        if self.world.names("RLJobScale"):
            self.world.scale(POOL, replicas)

    @rule(zone=st.sampled_from("ab"))
    def changes_the_pool(self, zone: str) -> None:
        self.world.change(rollouts=pool(zone))

    @rule(load=st.integers(-1, 2))
    def reports(self, load: int) -> None:
        engines = [
            {"name": pod.metadata.name, "load": max(0, load), "drained": load < 0} for pod in self.world.find("head")
        ]
        self.world.tell(state="Running", engines=engines)

    @rule(which=st.integers(0, 20))
    def deletes_a_ray_cluster(self, which: int) -> None:
        names = self.world.names("RayCluster")
        if names:
            self.world.remove(("RayCluster", names[which % len(names)]))

    # the cluster

    @rule(seconds=st.sampled_from([0.4, 1, 5, 61, 700]))
    def time_passes(self, seconds: float) -> None:
        self.world.now += seconds

    @rule()
    def pods_are_made_and_become_ready(self) -> None:
        self.world.make_pods()
        self.world.ready()

    @rule()
    def all_pods_have_been_ready(self) -> None:
        self.world.provisioned()

    @rule()
    def orphans_disappear(self) -> None:
        for name in self.orphans:
            self.world.pods.pop(name, None)
        self.orphans = {}

    @rule(which=st.integers(0, 20), how=st.sampled_from(["exit", "disrupt", "delete", "vanish", "fail"]))
    def a_pod_ends(self, which: int, how: str) -> None:
        pods = [pod for pod in self.world.find("rollout") if pod.metadata.name not in self.orphans]
        if not pods:
            return
        pod = pods[which % len(pods)]
        if how == "exit":
            self.world.exit(pod.metadata.name, 1, fatal=False)
        elif how == "disrupt":
            self.world.disrupt(pod.metadata.name)
        elif how == "delete":
            put(pod.metadata, deletion_timestamp=instant(self.world.now))
        elif how == "fail":
            put(pod.status, phase="Failed")
        else:
            del self.world.pods[pod.metadata.name]

    # invariants

    @invariant()
    def the_pool_recovers(self) -> None:
        """When nothing else happens, exactly the desired engines come to be, and stay."""
        world, orphans = self.world, self.orphans
        saved = world.children, world.pods, world.status, world.now, list(world.events)
        world.children, world.pods = copy.deepcopy(world.children), copy.deepcopy(world.pods)
        self.orphans = dict(orphans)
        for _ in range(12):
            self.plan()
            self.orphans_disappear()
            self.pods_are_made_and_become_ready()
            world.now += 65
        self.all_pods_have_been_ready()
        wanted = world.observe().scales.get(POOL, LEAST)
        made = self.plan()
        assert world.role(POOL).ready == world.role(POOL).desired == wanted == len(world.names("RayCluster"))
        assert not [ref for ref, _ in made.deletions if ref[0] == "RayCluster"]
        assert world.status.draining == []
        world.children, world.pods, world.status, world.now, world.events = saved
        self.orphans = orphans


RayHistories.TestCase.settings = settings(
    max_examples=25, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)
TestRayHistories = RayHistories.TestCase
