"""Speed of the scheduler against simpler policies, in virtual time.

    python -m benchmarks.scheduling --json [--only queue,rlvr_long] [--scale 0.2] [--processes 2] [--keep]
        [--directory runs/scheduling] [--timeout SECONDS]

Every scenario of benchmarks/scenarios/ is run by the production coordinator and runner (:mod:`rljob.simulation`), with
engines, rewards, environments and trainer that take the times of the scenario. Baselines are other policies in the
same simulator. Replications of a scenario are paired by seed: all policies draw equal times for equal samples.

Each ratio has its 95 % confidence interval; targets are compared with the ratio itself. ``--scale`` multiplies
replications and steps; a smaller scale has wider intervals. Except for ``simulated_events_per_second``, the figures do
not depend on the machine. The benchmark fails at the time-out (--timeout); with ``--keep`` the file then has the
scenarios that were complete, which the figure ``scenarios`` lists with their simulated events per second.

All simulations are started at the beginning and divided among the processes; each that ends is a line on stderr. Its
results are kept in --directory, so that an interrupted benchmark continues there, unless the code has changed.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import time_limit
from benchmarks.report import names_of, report, save, target
from benchmarks.scheduling_cells import Simulations, Started, digest_of_code
from benchmarks.scheduling_runs import (
    Figures,
    Policy,
    Scenario,
    constant_rate,
    long_answers,
    mean_of,
    one_answer_each,
    one_batch,
    trajectories,
)
from benchmarks.scheduling_statistics import ratio, same_distribution

TIMEOUT_SECONDS = 6 * 3600.0
DIRECTORY = Path("runs/scheduling")
CELLS_OF_A_PROCESS = 40
"""A process is replaced after so many: it grows."""
SCENARIOS = Path(__file__).with_name("scenarios")
SPLITS = (12, 13, 14, 15)
"""Engine nodes of rlvr_long that are tried for the best split."""
SPLIT_STEPS = 30
KOLMOGOROV_P = 0.01
MEAN_LENGTH = 0.97
AT_HOME = 0.9


@dataclass
class Measurement:
    """The results of all scenarios, and what simulates them; ``scale``: of replications and steps."""

    simulations: Simulations
    scale: float
    figures: dict[str, Any] = field(default_factory=dict)
    targets: dict[str, Any] = field(default_factory=dict)
    events: int = 0
    cpu: float = 0.0

    def count(self, full: int, least: int) -> int:
        """Return a scaled number of replications or steps."""
        return max(least, round(full * self.scale))

    def runs(self, started: Started) -> list[Figures]:
        """Wait for simulations, and return the figures of each replication."""
        runs = started.get()
        self.events += sum(run.events for run in runs)
        self.cpu += sum(run.cpu for run in runs)
        return runs

    def speedup(self, name: str, baseline: list[Figures], runs: list[Figures], bound: float, of: str) -> None:
        """Add a ratio of durations and its target; ``of``: the field of a run that is compared."""
        found = ratio(mean_of(baseline, of), mean_of(runs, of))
        self.figures[name] = found
        self.targets[name] = target(found["value"], ">=", bound)


Steps = Iterator[None]
"""The measurement of a scenario starts simulations before each item, and waits for them after it."""


def measure_long_answers(scenario: Scenario, all_: Measurement) -> Steps:
    """rlvr_long: α = 1, 2, 4 against a synchronous run, each with its best split of the nodes: the shortest step, at
    α = 4 of the splits whose samples are as young as the scenario demands of the same run."""
    steps, seeds, targets = all_.count(scenario["steps"], 40), scenario["seeds"], scenario["targets"]
    start = all_.simulations.start
    cases = [
        ("rlvr_async_speedup_alpha_1", Policy(alpha=1)),
        ("rlvr_async_speedup_alpha_2", Policy(alpha=2)),
        ("rlvr_async_speedup", Policy(alpha=4)),
        ("rlvr_async_speedup_alpha_1_two_redundant", Policy(alpha=1, groups=2)),
        ("rlvr_async_speedup_alpha_2_two_redundant", Policy(alpha=2, groups=2)),
    ]
    splits = [[start(long_answers, 1, scenario, policy, SPLIT_STEPS, nodes) for nodes in SPLITS] for _, policy in cases]
    synchronous = start(long_answers, seeds, scenario, Policy(baseline=True), steps, 0)
    yield
    started = []
    for (_, policy), tried in zip(cases, splits, strict=True):
        nodes = _best_split(tried, targets["rlvr_async_mean_age"] if policy.alpha == 4 else math.inf)
        started.append((nodes, start(long_answers, seeds, scenario, policy, steps, nodes)))
    yield
    baseline = all_.runs(synchronous)
    all_.figures["rlvr_synchronous_step_seconds"] = statistics.fmean(mean_of(baseline, "step"))
    for (name, policy), (nodes, simulated) in zip(cases, started, strict=True):
        runs = all_.runs(simulated)
        all_.speedup(name, baseline, runs, targets[name], "step")
        _add_samples(name, policy, nodes, runs, all_)
    age = all_.figures["rlvr_async_speedup"]["mean_age"]
    all_.targets["rlvr_async_mean_age"] = target(age, "<=", targets["rlvr_async_mean_age"])


def _add_samples(name: str, policy: Policy, nodes: int, runs: list[Figures], all_: Measurement) -> None:
    """Add the figures of the samples of a case of rlvr_long, and their targets."""
    lengths, ages = figures_of_lengths(runs), [age for run in runs for age in run.ages]
    all_.figures[name] |= {
        "engine_nodes": nodes, "mean_age": statistics.fmean(ages), "oldest": max(ages), **lengths,
        "members_at_home": min(mean_of(runs, "members_at_home")),
    }  # fmt: skip
    all_.targets[f"{name}_members_at_home"] = target(all_.figures[name]["members_at_home"], ">=", AT_HOME)
    all_.targets[f"{name}_oldest"] = target(max(ages), "<=", policy.alpha)
    if policy.groups:
        all_.targets[f"{name}_mean_length"] = target(lengths["mean_length"], ">=", MEAN_LENGTH)
    else:
        all_.targets[f"{name}_lengths_p"] = target(lengths["lengths_p"], ">=", KOLMOGOROV_P)


def figures_of_lengths(runs: list[Figures]) -> dict[str, float | None]:
    """Return whether short answers were preferred.

    ``mean_length``: of trained over submitted answers. ``lengths_p``: the p-value of trained against submitted answers,
    which is the figure that the target is for. The submitted answers contain the trained ones, so these samples are not
    independent: the test sees a selection that leaves out a large part of the answers, and its p-value is near 1 if few
    are left out, however much longer they are. A run without redundancy trains all answers that it submits: its p-value
    is 1, and cannot be less.

    ``left_out``: number of the answers that were not trained although their group began before the last α + 1 steps, so
    that it could have been. ``left_out_p``: the p-value of trained answers against them, None if there are none. It has
    no target: redundant groups leave out the answers that are late, which are the long ones.
    """
    lengths, submitted, left_out = (
        [x for run in runs for x in getattr(run, each)] for each in ("lengths", "submitted", "left_out")
    )
    return {
        "mean_length": statistics.fmean(lengths) / statistics.fmean(submitted),
        "lengths_p": same_distribution(lengths, submitted),
        "left_out": len(left_out),
        "left_out_p": same_distribution(lengths, left_out) if left_out else None,
    }


def _best_split(tried: list[Started], mean_age: float) -> int:
    """Return the number of engine nodes with the shortest step, of those with a mean staleness of at most ``mean_age``
    in the second half of a short run; of all, if there are none."""
    runs = [run for started in tried for run in started.get()]
    return best_split(
        mean_of(runs, "step"), [statistics.fmean(run.ages[len(run.ages) // 2 :]) for run in runs], mean_age
    )


def best_split(steps: Sequence[float], ages: Sequence[float], mean_age: float) -> int:
    """Return the one of :data:`SPLITS` with the shortest step, of those whose age is at most ``mean_age`` if there are
    any.

    Args:
        steps: seconds of a step with each split.
        ages: mean staleness with each split.
        mean_age: limit.
    """
    young = [i for i, age in enumerate(ages) if age <= mean_age] or range(len(steps))
    return SPLITS[min(young, key=lambda i: steps[i])]


def measure_constant_rate(scenario: Scenario, all_: Measurement) -> Steps:
    """constant_rate: the two bounds of ROLL Flash, and the distance from the work of the busiest side."""
    steps, seeds = all_.count(scenario["steps"], 30), scenario["seeds"]
    slots, samples = scenario["slots"], scenario["groups"] * scenario["members"]
    train, longest = scenario["train_seconds_per_sample"], scenario["sample_seconds"]["cap"]
    started = {
        alpha: all_.simulations.start(constant_rate, seeds, scenario, Policy(alpha=alpha), steps)
        for alpha in scenario["alphas"]
    }
    yield
    gaps = []
    for alpha, simulated in started.items():
        runs = all_.runs(simulated)
        mean = statistics.fmean(length for run in runs for length in run.submitted)
        step, wait = statistics.fmean(mean_of(runs, "step")), longest / (alpha + 1)
        completion = (step - (train * samples if alpha == 0 else 0)) / samples  # at α = 0 nothing completes in training
        bounds = {"step": samples / slots * (mean + train) + wait, "completion": mean / slots + wait / samples}
        all_.figures[f"constant_rate_alpha_{alpha}"] = {"step": step, "completion": completion, "bounds": bounds}
        all_.targets[f"constant_rate_step_alpha_{alpha}"] = target(step, "<=", bounds["step"])
        all_.targets[f"constant_rate_completion_alpha_{alpha}"] = target(completion, "<=", bounds["completion"])
        if alpha:
            gaps.append(step / max(samples * mean / slots, train * samples) - 1)
    all_.figures["worst_gap_to_bound"] = max(gaps)
    all_.targets["worst_gap_to_bound"] = target(max(gaps), "<=", 0.05)


def measure_queue(scenario: Scenario, all_: Measurement) -> Steps:
    """queue: one batch with a filter, against whole batches."""
    seeds, targets = all_.count(scenario["replications"], 20), scenario["targets"]
    start = all_.simulations.start
    whole = start(one_batch, seeds, scenario, Policy(baseline=True))
    started = {
        name: start(one_batch, seeds, scenario, Policy(groups=groups))
        for name, groups in (
            ("queue_speedup", scenario["redundant_groups_queue"]),
            ("queue_redundant_speedup", scenario["redundant_groups"]),
        )
    }
    yield
    baseline = all_.runs(whole)
    for name, simulated in started.items():
        all_.speedup(name, baseline, all_.runs(simulated), targets[name], "seconds")


def measure_replication(scenario: Scenario, all_: Measurement) -> Steps:
    """replication: samples of a group on many engines, against each group on one engine."""
    seeds = all_.count(scenario["replications"], 20)
    start = all_.simulations.start
    compared = start(one_answer_each, seeds, scenario, Policy(baseline=True))
    simulated = start(one_answer_each, seeds, scenario, Policy())
    yield
    baseline, runs = all_.runs(compared), all_.runs(simulated)
    all_.speedup("replication_speedup", baseline, runs, scenario["targets"]["replication_speedup"], "seconds")


def measure_env_async(scenario: Scenario, all_: Measurement) -> Steps:
    """env_async: trajectories on their own, against a barrier after every turn."""
    seeds = all_.count(scenario["replications"], 5)
    shape = scenario | {"groups": scenario["trajectories"] // 8, "members": 8}
    start = all_.simulations.start
    compared = start(trajectories, seeds, shape, Policy(), 1, True)
    simulated = start(trajectories, seeds, shape, Policy(), 1, False)
    yield
    baseline, runs = all_.runs(compared), all_.runs(simulated)
    all_.speedup("env_async_speedup", baseline, runs, scenario["targets"]["env_async_speedup"], "seconds")


def measure_redundant_env(scenario: Scenario, all_: Measurement) -> Steps:
    """redundant_env: one batch with redundant groups and members, against none."""
    seeds, shape = all_.count(scenario["replications"], 20), scenario | scenario["needed"]
    start = all_.simulations.start
    compared = start(trajectories, seeds, shape, Policy(), 1, False)
    simulated = start(trajectories, seeds, shape, _offered(scenario["needed"], scenario["offered"], 0), 1, False)
    yield
    baseline, runs = all_.runs(compared), all_.runs(simulated)
    all_.speedup("redundant_env_speedup", baseline, runs, scenario["targets"]["redundant_env_speedup"], "seconds")


def measure_agentic(scenario: Scenario, all_: Measurement) -> Steps:
    """agentic: a whole run, against a synchronous one with a barrier after every turn."""
    steps, seeds = all_.count(scenario["steps"], 12), scenario["seeds"]
    start = all_.simulations.start
    compared = start(trajectories, seeds, scenario, Policy(), max(6, steps // 4), True)
    policy = _offered(scenario, scenario["offered"], scenario["alpha"])
    simulated = start(trajectories, seeds, scenario, policy, steps, False)
    yield
    baseline, runs = all_.runs(compared), all_.runs(simulated)
    all_.speedup("agentic_speedup", baseline, runs, scenario["targets"]["agentic_speedup"], "step")
    all_.figures["agentic_speedup"]["mean_age"] = statistics.fmean(age for run in runs for age in run.ages)


def _offered(needed: dict[str, int], offered: dict[str, int], alpha: int) -> Policy:
    return Policy(alpha, offered["groups"] - needed["groups"], offered["members"] - needed["members"])


MEASUREMENTS: dict[str, Callable[[Scenario, Measurement], Steps]] = {
    "rlvr_long": measure_long_answers,  # its simulations depend on others, which are first
    "queue": measure_queue,
    "replication": measure_replication,
    "redundant_env": measure_redundant_env,
    "env_async": measure_env_async,
    "constant_rate": measure_constant_rate,
    "agentic": measure_agentic,
}


def main() -> None:
    """Measure and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON (there is no other format)")
    some = f"of {', '.join(MEASUREMENTS)}, comma-separated"
    parser.add_argument("--only", type=names_of(MEASUREMENTS), default=[*MEASUREMENTS], help=some)
    parser.add_argument("--scale", type=float, default=1.0, help="of replications and steps, more than 0, at most 1")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="processes that simulate")
    parser.add_argument(
        "--directory", type=Path, default=DIRECTORY, help=f"of finished simulations (default {DIRECTORY})"
    )
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/scheduling.json")
    time_limit.add_option(parser, TIMEOUT_SECONDS)
    options = parser.parse_args()
    if not 0 < options.scale <= 1:
        parser.error(f"--scale is {options.scale:g}; give a number above 0 and at most 1")
    if options.processes < 1:
        parser.error(f"--processes is {options.processes}; give at least 1")
    time_limit.limit("benchmarks.scheduling", options.timeout)
    with multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=CELLS_OF_A_PROCESS) as pool:
        found = Measurement(Simulations(pool, options.directory, digest_of_code()), options.scale)
        measure([name for name in MEASUREMENTS if name in options.only], found, options.keep)
    report("scheduling", found.figures, found.targets, options.keep)


def measure(names: Sequence[str], found: Measurement, keep: bool) -> None:
    """Measure scenarios, and their simulated events per second. ``keep``: write the result after each of them."""
    scenarios = {name: json.loads((SCENARIOS / f"{name}.json").read_text()) for name in names}
    steps = {name: MEASUREMENTS[name](scenario, found) for name, scenario in scenarios.items()}
    while steps:
        for name in [*steps]:
            events, cpu = found.events, found.cpu
            try:
                next(steps[name])
            except StopIteration:
                del steps[name]
                rates = found.figures.setdefault("scenarios", {})
                rates[name] = (found.events - events) / (found.cpu - cpu)
                rate = found.events / found.cpu
                found.figures |= {"scale": found.scale, "simulated_events_per_second": rate}
                found.targets["simulated_events_per_second"] = target(rate, ">=", 50_000)
                if keep:
                    save("scheduling", found.figures, found.targets)


if __name__ == "__main__":
    main()
