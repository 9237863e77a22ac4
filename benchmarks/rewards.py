"""Samples per second of the workers of a reward service, and the cost of a run in the sandbox of the reward `code`.

    python -m benchmarks.rewards --json [--rounds 10] [--keep] [--timeout SECONDS]

Each reward runs in the worker processes of rljob's service (without HTTP), on one core with one worker and on two cores
with two; each worker has two samples at a time. The program of `code` reads a number and prints its double.
`code_runs_over_fork_exec` compares, in alternating rounds on one core, whole samples of `code` with processes of bare
Python (`python3 -S -E -I -c pass`) that the same process starts and waits for one after another.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks import time_limit
from benchmarks.report import report, target
from rljob.api.rewards import REWARDS
from rljob.protocol.score_messages import Score, ScoreItem
from rljob.rewards.code_reward import CodeReward
from rljob.rewards.evaluate import RewardEvaluator
from rljob.rewards.pool import Pool
from rljob.rewards.sandbox.isolation import find_isolation

TIMEOUT_SECONDS = 600.0
SAMPLES = {"trivial": 2000, "code": 200}
EXECUTIONS = 50
PER_WORKER = 2
COMPLETION = "```python\nprint(2 * int(input()))\n```"
TESTS = {"tests": [{"input": "21", "output": "42"}]}


def trivial(completion: str) -> float:
    """A reward whose own time does not count."""
    return float(bool(completion))


def evaluator(name: str) -> Callable[[ScoreItem], Score]:
    """Return a reward as the service calls it."""
    return RewardEvaluator(trivial if name == "trivial" else CodeReward(REWARDS["code"].parse({}), []), name)


async def score(pool: Pool, count: int, clients: int) -> list[float]:
    """Score ``count`` samples, ``clients`` at a time; return the seconds of each.

    Raises:
        RuntimeError: a sample has an error, or the wrong score.
    """
    seconds: list[float] = []

    async def client(number: int) -> None:
        for i in range(number, count, clients):
            item = ScoreItem(f"g{i}", "sums", "", COMPLETION, "stop", TESTS)
            began = time.perf_counter()
            (given,) = await pool.score([item])
            seconds.append(time.perf_counter() - began)
            if given.error or given.reward != 1:
                raise RuntimeError(f"a sample has the score {given}")

    await asyncio.gather(*(client(number) for number in range(clients)))
    return seconds


async def measure(name: str, cores: int, rounds: int) -> dict[str, float]:
    """Return samples/s and the 99th percentile of a sample's time; for `code` on one core also executions of Python."""
    latencies: list[float] = []
    times: list[float] = []
    executions: list[float] = []
    async with Pool(evaluator(name), name, cores, 60.0) as pool:
        await score(pool, 4 * cores, PER_WORKER * cores)  # starts the zygotes
        for _ in range(rounds):
            began = time.perf_counter()
            latencies += await score(pool, SAMPLES[name], PER_WORKER * cores)
            times.append(time.perf_counter() - began)
            if name == "code" and cores == 1:
                executions.append(execute(EXECUTIONS))
    figures = {"samples_per_second": SAMPLES[name] * rounds / sum(times)}
    figures["p99_ms"] = 1000 * statistics.quantiles(latencies, n=100)[98]
    if executions:
        figures["fork_exec_per_second"] = EXECUTIONS * rounds / sum(executions)
        ratios = [SAMPLES[name] / a * b / EXECUTIONS for a, b in zip(times, executions, strict=True)]
        figures["runs_over_fork_exec"] = statistics.median(ratios)
    return figures


def execute(count: int) -> float:
    """Start bare Python ``count`` times; return the seconds."""
    command = [os.path.realpath(sys.executable), "-S", "-E", "-I", "-c", "pass"]
    began = time.perf_counter()
    for _ in range(count):
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    """Measure and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON (there is no other format)")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/rewards.json")
    time_limit.add_option(parser, TIMEOUT_SECONDS)
    options = parser.parse_args()
    time_limit.limit("benchmarks.rewards", options.timeout)
    available = sorted(os.sched_getaffinity(0))
    figures: dict[str, Any] = {"layers": list(find_isolation().present)}
    for cores in (1, 2):
        if cores <= len(available):
            os.sched_setaffinity(0, available[:cores])
            for name in SAMPLES:
                found = asyncio.run(measure(name, cores, options.rounds))
                figures |= {f"{name}_{cores}_{figure}": value for figure, value in found.items()}
    ratio = figures.pop("code_1_runs_over_fork_exec")
    report("rewards", figures, {"code_runs_over_fork_exec": target(ratio, ">=", 3.0)}, options.keep)


if __name__ == "__main__":
    main()
