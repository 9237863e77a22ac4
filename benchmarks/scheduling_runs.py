"""Simulated runs of the scheduling benchmark: one function for each kind of scenario.

Every function takes the scenario, a seed and a policy, and returns the figures of one run. All of them run the
production coordinator and runner in virtual time (:mod:`rljob.simulation`).
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.scheduling_policies import environment_loop, use_groups_on_one_engine, use_whole_batches
from benchmarks.scheduling_statistics import draw, fraction, uniform
from rljob.api.models import RLJob
from rljob.api.resolve import resolve
from rljob.protocol import agent_protocol as m
from rljob.simulation.simulated_engine import EngineModel
from rljob.simulation.simulated_run import Outcome, SimulatedCluster, simulate

Scenario = dict[str, Any]
MAX_SECONDS = 86_400.0
"""Limit of failurePolicy.stallSeconds: no environment of a scenario is slower."""
FAIL_SLOW = 1  # kind of a draw


@dataclass(frozen=True)
class Policy:
    """How a run is scheduled. ``baseline``: the scenario's other policy instead of rljob's."""

    alpha: int = 0
    groups: int = 0  # redundant
    members: int = 0  # redundant
    baseline: bool = False


@dataclass(frozen=True)
class Figures:
    """Figures of one run; times in seconds. ``lengths``: work of the trained samples; ``submitted``: of all;
    ``left_out``: of those that were not trained although their group began before the last α + 1 steps.
    ``members_at_home``: fraction of members that found the prefix of their group on their engine."""

    seconds: float
    step: float = 0.0
    ages: list[int] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    submitted: list[float] = field(default_factory=list)
    left_out: list[float] = field(default_factory=list)
    members_at_home: float = 1.0
    events: int = 0
    cpu: float = 0.0


def job(scenario: Scenario, seed: int, policy: Policy, steps: int, slots: int, group_filter: str = "none") -> RLJob:
    """Return the resolved manifest of a scenario."""
    spec = {
        "seed": seed,
        "models": [{"name": "policy", "source": "job://model"}],
        "training": {
            "steps": steps,
            "promptsPerStep": scenario["groups"],
            "samplesPerPrompt": scenario["members"],
            "maxStaleness": policy.alpha,
        },
        "scheduling": {
            "redundancy": {"groups": policy.groups, "members": policy.members},
            "onDeadline": scenario.get("on_deadline", "wait"),
        },
        "algorithm": {"groupFilter": group_filter},
        "tasks": [{"name": "task", "data": {"reasoningGym": {"dataset": "chain_sum"}}, "reward": "reward"}],
        "rewards": [{"name": "reward", "builtin": "reasoning_gym"}],
        "rollouts": [{"name": "main", "maxConcurrency": slots, "maxModelLength": 32_768}],
        "checkpoints": {"everySteps": 1_000_000, "keep": 1},
        "failurePolicy": {"stallSeconds": MAX_SECONDS},
    }
    return resolve(RLJob.model_validate({"metadata": {"name": "simulated"}, "spec": spec}))


def engines(count: int, model: EngineModel) -> list[tuple[str, EngineModel]]:
    """Return ``count`` engines of the pool."""
    return [("main", model)] * count


def measured(manifest: RLJob, cluster: SimulatedCluster, warm_up: int = 0, **options: Any) -> Figures:
    """Simulate a run; ``warm_up``: steps before the first one whose duration counts."""
    work: dict[str, float] = {}
    groups: dict[str, float] = {}  # when their first request began

    def recorded(request: m.Generate) -> float:
        sample = request.request_id.sample
        seconds = work[sample] = cluster.work(request)
        groups.setdefault(group_of(sample), asyncio.get_running_loop().time())
        return seconds

    began = time.process_time()
    outcome: Outcome = simulate(manifest, replace(cluster, work=recorded), **options)
    cpu = time.process_time() - began
    ends, trained = outcome.steps[warm_up:], set(outcome.trained)
    # A group that begins in the step before the last α + 1 has a version that each of them may train.
    last = manifest.spec.training.max_staleness + 1
    limit = outcome.steps[-last - 1] if len(outcome.steps) > last else 0.0
    return Figures(
        seconds=outcome.steps[-1],
        step=(ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else 0.0,
        ages=outcome.ages,
        lengths=[work[sample] for sample in outcome.trained],
        submitted=list(work.values()),
        left_out=[work[sample] for sample in work if sample not in trained and groups[group_of(sample)] < limit],
        members_at_home=outcome.members_at_home,
        events=outcome.events,
        cpu=cpu,
    )


def group_of(sample: str) -> str:
    """Return the group of a sample."""
    return sample.partition(".")[0]


def long_answers(scenario: Scenario, seed: int, policy: Policy, steps: int, nodes: int) -> Figures:
    """Simulate rlvr_long with ``nodes`` engine nodes; the baseline: all nodes generate, then all train."""
    total, slots = scenario["nodes"], scenario["slots_per_node"]
    trainers = total if policy.baseline else total - nodes
    cluster = SimulatedCluster(
        engines(total if policy.baseline else nodes, EngineModel(slots)),
        lambda request: draw(scenario["sample_seconds"], fraction(request.sampling.seed)),
        lambda batch: scenario["train_node_seconds"] / trainers,
        scenario["weight_sync_seconds"],
    )
    return measured(job(scenario, seed, policy, steps, slots), cluster, min(scenario["warm_up_steps"], steps // 4))


def constant_rate(scenario: Scenario, seed: int, policy: Policy, steps: int) -> Figures:
    """Simulate constant_rate: 8 engines share the slots."""
    slots = scenario["slots"] // 8
    samples = scenario["groups"] * scenario["members"]
    cluster = SimulatedCluster(
        engines(8, EngineModel(slots)),
        lambda request: draw(scenario["sample_seconds"], fraction(request.sampling.seed)),
        lambda batch: scenario["train_seconds_per_sample"] * samples,
    )
    return measured(job(scenario, seed, policy, steps, slots), cluster, steps // 10)


def one_batch(scenario: Scenario, seed: int, policy: Policy) -> Figures:
    """Simulate queue: one batch of groups that the filter accepts; the baseline: whole batches."""

    async def reward(sample: str) -> float:
        group, member = sample.split(".")
        return float(uniform(seed, group) < scenario["accept_probability"] and int(member) % 2)

    slots = scenario["slots_per_engine"]
    cluster = SimulatedCluster(
        engines(scenario["engines"], EngineModel(slots)),
        lambda request: draw(scenario["sample_seconds"], fraction(request.sampling.seed)),
        lambda batch: 0.0,
        reward=reward,
    )
    manifest = job(scenario, seed, policy, 1, slots, "nonconstant")
    return measured(manifest, cluster, prepare=use_whole_batches if policy.baseline else None)


def one_answer_each(scenario: Scenario, seed: int, policy: Policy) -> Figures:
    """Simulate replication: one batch of all groups; the baseline: each group on one engine."""
    tokens, decode = scenario["tokens"], scenario["decode"]
    group = {"dist": "lognormal", "median": tokens["group_median"], "sigma": tokens["group_sigma"], "cap": float("inf")}
    member = {"dist": "lognormal", "median": 1.0, "sigma": tokens["member_sigma"], "cap": float("inf")}

    def work(request: m.Generate) -> float:
        sample = request.request_id.sample
        together = draw(group, uniform(seed, sample.split(".")[0]))
        return min(tokens["cap"], together * draw(member, fraction(request.sampling.seed)))

    slots = scenario["slots_per_engine"]
    model = EngineModel(slots, decode["tokens_per_second_per_sequence"], decode["engine_peak_tokens_per_second"])
    cluster = SimulatedCluster(engines(scenario["engines"], model), work, lambda batch: 0.0)
    prepare = use_groups_on_one_engine if policy.baseline else None
    return measured(job(scenario, seed, policy, 1, slots), cluster, prepare=prepare)


def environment(scenario: Scenario, seed: int) -> Callable[[str, int], float]:
    """Return the latency of a scenario's environments; the fail-slow ones included."""
    slow = scenario.get("fail_slow", {"probability_per_turn": 0.0, "factor": 1})

    def seconds(sample: str, turn: int) -> float:
        latency = draw(scenario["env_seconds"], uniform(seed, sample, turn))
        fails = uniform(seed, sample, turn, FAIL_SLOW) < slow["probability_per_turn"]
        return latency * slow["factor"] if fails else latency

    return seconds


def trajectories(scenario: Scenario, seed: int, policy: Policy, steps: int, barrier: bool) -> Figures:
    """Simulate trajectories in environments; ``barrier``: all of a batch wait for each other after every turn."""
    slots = scenario.get("env_slots", 1 << 12)
    members = scenario["groups"] * scenario["members"]
    cluster = SimulatedCluster(
        engines(1, EngineModel(slots)),
        lambda request: scenario["generate_seconds_per_turn"],
        lambda batch: scenario.get("train_seconds", 0.0),
        scenario.get("weight_sync_seconds", 0.0),
        loop=environment_loop(scenario["turns"], environment(scenario, seed), members if barrier else 0),
        capacity=slots,
    )
    return measured(
        job(scenario, seed, policy, steps, slots), cluster, min(scenario.get("warm_up_steps", 0), steps // 4)
    )


def mean_of(runs: list[Figures], name: str) -> list[float]:
    """Return one number of each run: a field, or the mean of a list."""
    values = [getattr(run, name) for run in runs]
    return [statistics.fmean(value) if isinstance(value, list) else value for value in values]
