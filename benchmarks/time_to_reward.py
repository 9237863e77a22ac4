"""Seconds until the model of the quickstart answers three of four problems correctly, by activity.

    python -m benchmarks.time_to_reward --json [--seeds 1,2,3] [--keep] [--timeout SECONDS]

Runs `rljob run examples/quickstart.yaml` once for each seed, as `make quickstart SEED=n` does, and reads the files of
the run. `seconds_to_0_75` is the time of the first step at which the mean reward of the last ten batches (sampled
answers to new training problems) is at least 0.75; null when no step reaches it. Generation, training, weight updates
and the trainer's waiting overlap, so their times do not add up to the time of the run.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import time_limit
from benchmarks.report import report, target
from rljob.protocol.run_status import RunStatus, decode_status

TIMEOUT_SECONDS = 3600.0
WINDOW = 10
GOAL = 0.75
QUICKSTART = Path(__file__).parents[1] / "examples/quickstart.yaml"
ACTIVITIES = ("generating", "training", "updating_weights", "trainer_waiting")


def run(seed: int, directory: Path, changes: Sequence[str] = ()) -> float:
    """Run the quickstart; return its time in seconds.

    Args:
        seed: of the run.
        directory: of the run.
        changes: of the manifest, as for --set.

    Raises:
        subprocess.CalledProcessError: the run failed.
    """
    command = [sys.executable, "-m", "rljob.cli.main", "run", str(QUICKSTART)]
    for change in (f"spec.seed={seed}", *changes):
        command += ["--set", change]
    began = time.perf_counter()
    subprocess.run([*command, "--run-dir", str(directory), "--no-screen"], check=True, stdout=sys.stderr)
    return time.perf_counter() - began


def figures_of(directory: Path, seconds: float) -> dict[str, Any]:
    """Return the figures of a finished run."""
    status = decode_status((directory / "status.json").read_bytes())
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    start = events[0]["time"]

    def at(subject: str, event: str) -> float:
        return next(e["time"] for e in events if e["subject"] == subject and e["event"] == event) - start

    initialized, started = at("initializer", "exited"), at("trainer", "started")
    evaluating, training = at("run", "Evaluating"), at("run", "Running")
    steps = status.progress.steps
    metrics = {metric.name: metric.value for metric in status.metrics}
    reached = _reached(status)
    last = status.history[-1].seconds - status.history[0].seconds
    before, after = status.evaluations[0], status.evaluations[-1]
    return {
        "run_seconds": seconds,
        "initializer_seconds": initialized,
        "engine_start_seconds": evaluating - started,
        "first_evaluation_seconds": training - evaluating,
        "seconds_to_0_75": None if reached is None else _time_of(directory, reached) - start,
        "step_seconds": last / (steps - 1),
        "accuracy_before": before.accuracy,
        "accuracy_after": after.accuracy,
        "accuracy_gain": after.accuracy - before.accuracy,
        **{f"{name}_seconds": metrics[f"seconds_{name}"] for name in ACTIVITIES},
    }


def _reached(status: RunStatus) -> int | None:
    rewards = [point.reward for point in status.history]
    for end in range(WINDOW, len(rewards) + 1):
        if sum(rewards[end - WINDOW : end]) / WINDOW >= GOAL:
            return end - 1
    return None


def _time_of(directory: Path, step: int) -> float:
    with sqlite3.connect(directory / "ledger.sqlite") as ledger:
        row = ledger.execute("SELECT MIN(time) FROM applied WHERE step = ?", (step,)).fetchone()
    return float(row[0])


def main() -> None:
    """Run all seeds and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON (there is no other format)")
    parser.add_argument("--seeds", default="1,2,3", help="comma-separated")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/time_to_reward.json")
    time_limit.add_option(parser, TIMEOUT_SECONDS)
    options = parser.parse_args()
    time_limit.limit("benchmarks.time_to_reward", options.timeout)
    runs = {}
    with tempfile.TemporaryDirectory(prefix="rljob-bench-") as folder:
        for seed in (int(seed) for seed in options.seeds.split(",")):
            directory = Path(folder) / f"seed-{seed}"
            runs[seed] = figures_of(directory, run(seed, directory))
    figures: dict[str, Any] = {
        f"{name}_seed_{seed}": value for seed, run_ in runs.items() for name, value in run_.items()
    }
    mean = {name: statistics.mean(run_[name] for run_ in runs.values()) for name in ("accuracy_after", "accuracy_gain")}
    figures |= {f"{name}_mean": value for name, value in mean.items()}
    targets = {
        "final_accuracy": target(mean["accuracy_after"], ">=", GOAL),
        "accuracy_gain": target(mean["accuracy_gain"], ">=", 0.3),
        "run_seconds": target(max(run_["run_seconds"] for run_ in runs.values()), "<=", 300.0),
    }
    report("time_to_reward", figures, targets, options.keep)


if __name__ == "__main__":
    main()
