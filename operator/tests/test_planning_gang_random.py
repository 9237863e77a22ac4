"""Random clusters: nodes of several sizes, several jobs, deaths of trainers, engines and nodes. Pure: no clock, no API.

Invariant: no elastic engine holds an accelerator for more than a minute while a pod of its job's gang waits for one.
With a gang provider also: the pods of a gang get their first nodes together.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any

import pytest

from rljob.operator.api_types import Pod

from .world import World

SEEDS = range(100 if os.environ.get("RLJOB_THOROUGH") else 6)
STEPS = 70
LONGEST_WAIT = 60.0
FULL = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu. preemption: 0/4 nodes are available."
OTHERS = "waiting for minCount pods from a gang to be scheduled"


class Job:
    """A job: its world, the accelerators of its pods, and since when pods of its gang wait."""

    def __init__(self, chosen: random.Random, provider: str) -> None:
        self.devices = chosen.choice([1, 2, 4])
        self.nodes = chosen.randint(1, 2)
        low = chosen.randint(1, 3)
        pools = [{"name": "main", "replicas": {"min": low, "max": low + 6}}]
        trainer = {"nodes": self.nodes, "processesPerNode": self.devices}
        scheduling = {"gang": {"provider": provider}}
        policy = {"maxRestarts": 100_000}
        self.world = World(trainer=trainer, rollouts=pools, scheduling=scheduling, failurePolicy=policy)
        self.world.spec["training"] = {"steps": 3, "promptsPerStep": 8}
        self.world.settle()
        self.world.scale("rollout-main", low + chosen.randint(0, 6))
        self.size = self.nodes + low
        self.bound: dict[str, int] = {}
        """Pod → node."""
        self.waits: dict[str, float] = {}

    def gpu_pods(self) -> list[Pod]:
        return [pod for pod in self.world.find("sums-trainer", "rollout-main") if pod.status.phase != "Failed"]

    def gpus(self, pod: Pod) -> int:
        return self.devices if "trainer" in pod.metadata.name else 1


def is_member(pod: Pod) -> bool:
    return pod.metadata.labels["rljob.dev/tier"] == "gang"


class Nodes:
    """Nodes with accelerators, and a scheduler that tries pods in a random order."""

    def __init__(self, chosen: random.Random) -> None:
        self._chosen = chosen
        self.sizes = [chosen.choice([4, 8]) for _ in range(chosen.randint(2, 4))]

    def schedule(self, jobs: list[Job], provider: str) -> None:
        for job in self._chosen.sample(jobs, len(jobs)):
            job.bound = {name: node for name, node in job.bound.items() if name in job.world.pods}
            pods = [pod for pod in job.gpu_pods() if pod.metadata.name not in job.bound]
            self._chosen.shuffle(pods)
            if provider == "none":
                for pod in pods:
                    self._bind(jobs, job, [pod])
                continue
            members = [pod for pod in pods if is_member(pod)]
            there = sum(is_member(pod) for pod in job.gpu_pods())
            if members and there >= job.size:
                self._bind(jobs, job, sorted(members, key=lambda pod: "trainer" not in pod.metadata.name))
            for pod in pods:
                if not is_member(pod):
                    self._bind(jobs, job, [pod])

    def _bind(self, jobs: list[Job], job: Job, pods: list[Pod]) -> None:
        """Bind all of ``pods``, or none."""
        free = Counter(dict(enumerate(self.sizes)))
        for each in jobs:
            for pod in each.gpu_pods():
                if pod.metadata.name in each.bound:
                    free[each.bound[pod.metadata.name]] -= each.gpus(pod)
        chosen: dict[str, int] = {}
        for pod in pods:
            fitting = [node for node in free if free[node] >= job.gpus(pod)]
            if not fitting:
                blocked = pod.metadata.name
                break
            node = max(fitting, key=lambda node: (free[node], node))  # spreads, as kube-scheduler does
            free[node] -= job.gpus(pod)
            chosen[pod.metadata.name] = node
        else:
            job.bound |= chosen
            for pod in pods:
                job.world.ready(pod.metadata.name)
            return
        for pod in pods:
            if not pod.status.conditions:
                job.world.unschedulable(FULL if pod.metadata.name == blocked else OTHERS, pod.metadata.name)

    def fail(self, jobs: list[Job]) -> None:
        """A node fails with all its pods, and comes back empty with another size."""
        node = self._chosen.randrange(len(self.sizes))
        self.sizes[node] = self._chosen.choice([0, 4, 8])
        for job in jobs:
            lost = [name for name, where in job.bound.items() if where == node and name in job.world.pods]
            _die(job, lost)


def _die(job: Job, names: list[str]) -> None:
    """Have pods die: a trainer's Job fails with them, engines are replaced."""
    if any("trainer" in name for name in names) and any(kind == "Job" for kind, _ in job.world.children):
        job.world.exit("sums-trainer", 137)
        job.world.fail_job()
    for name in names:
        if "trainer" not in name:
            del job.world.pods[name]
    job.bound = {name: node for name, node in job.bound.items() if name not in names}


def _check(job: Job, seed: int) -> None:
    now = job.world.now
    pods = {pod.metadata.name: pod for pod in job.gpu_pods()}
    waiting = {name for name, pod in pods.items() if is_member(pod) and name not in job.bound}
    job.waits = {name: job.waits.get(name, now) for name in waiting}
    holding = [name for name in pods if name in job.bound and not is_member(pods[name])]
    late = [name for name, since in job.waits.items() if now - since > LONGEST_WAIT]
    assert not (late and holding), f"seed {seed}: {late} wait, {holding} hold accelerators"


@pytest.mark.parametrize("provider", ["none", "kubernetes", "volcano"])
@pytest.mark.parametrize("seed", SEEDS)
def test_no_elastic_engine_holds_an_accelerator_that_a_gang_waits_for(seed: int, provider: str) -> None:
    chosen = random.Random(f"{seed} {provider}")
    nodes, jobs = Nodes(chosen), [Job(chosen, provider) for _ in range(chosen.randint(1, 3))]
    whole = dict.fromkeys(range(len(jobs)), False)
    for _ in range(STEPS):
        for job in jobs:
            job.world.settle()
            job.world.make_pods()
        nodes.schedule(jobs, provider)
        for number, job in enumerate(jobs):
            _check(job, seed)
            members = [pod for pod in job.gpu_pods() if is_member(pod)]
            placed = sum(pod.metadata.name in job.bound for pod in members)
            if provider != "none" and not whole[number]:
                assert placed in (0, job.size), f"seed {seed}: {placed} of {job.size} pods of a gang have nodes"
            whole[number] = whole[number] or placed == job.size
            _report(chosen, job)
        if chosen.random() < 0.08:
            nodes.fail(jobs)
        for job in jobs:
            names = list(job.bound)
            if names and chosen.random() < 0.08:
                _die(job, [chosen.choice(names)])
        span = chosen.choice([1, 2, 5])
        for job in jobs:
            job.world.now += span


def _report(chosen: random.Random, job: Job) -> None:
    """Have the coordinator report busy or idle engines."""
    load = chosen.choice([0, 0, 9])
    engines: list[dict[str, Any]] = [
        {"name": pod.metadata.name, "load": load, "drained": not load} for pod in job.world.find("rollout-main")
    ]
    job.world.tell(state="Running", engines=engines)
