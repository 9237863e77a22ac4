"""Samples per second of a reward service and of the runner's client, and the cost of a run in the sandbox of `code`.

    python -m benchmarks.rewards --json [--rounds 10] [--keep] [--timeout SECONDS]

Each reward runs in the worker processes of rljob's service (without HTTP), on one core with one worker and on two cores
with two; each worker has two samples at a time. The answers of `mathematics` are different numbers in a box. The
program of `code` reads a number and prints its double.
`code_runs_over_fork_exec` compares, in alternating rounds on one core, whole samples of `code` with processes of bare
Python (`python3 -S -E -I -c pass`) that the same process starts and waits for one after another.
`client_share_of_service` compares, in alternating rounds on all cores, the samples of `mathematics` that the runner's
client gets a second over HTTP from a service of one worker with those of one worker without HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from benchmarks import time_limit
from benchmarks.report import report, target
from rljob.api.rewards import REWARDS
from rljob.api.roles import Reward
from rljob.protocol.free_port import free_port
from rljob.protocol.score_messages import Score, ScoreItem
from rljob.rewards.code_reward import CodeReward
from rljob.rewards.evaluate import RewardEvaluator
from rljob.rewards.math_reward import MathReward
from rljob.rewards.pool import Pool
from rljob.rewards.sandbox.isolation import find_isolation
from rljob.runner.scoring import RewardClient
from rljob.runner.service_http import service_session

TIMEOUT_SECONDS = 600.0
SAMPLES = {"trivial": 2000, "mathematics": 400, "code": 200}
EXECUTIONS = 50
PER_WORKER = 2
FOR_CLIENT = 64
"""Samples that end at the same time in a runner."""
PROGRAM = "```python\nprint(2 * int(input()))\n```"
TESTS = {"tests": [{"input": "21", "output": "42"}]}
_numbers = itertools.count(10_000)


def trivial(completion: str) -> float:
    """A reward whose own time does not count."""
    return float(bool(completion))


class Mathematics(MathReward):
    """The built-in reward `math` as it is without options."""

    def __init__(self) -> None:
        super().__init__(REWARDS["math"].parse({}), [])


def evaluator(name: str) -> RewardEvaluator:
    """Return a reward as the service calls it."""
    scorers: dict[str, Callable[[], Any]] = {
        "trivial": lambda: trivial,
        "mathematics": Mathematics,
        "code": lambda: CodeReward(REWARDS["code"].parse({}), []),
    }
    return RewardEvaluator(scorers[name](), name)


def samples(name: str, count: int) -> Iterator[ScoreItem]:
    """Yield right answers; no two of `mathematics` are the same, because the reward keeps what it has read."""
    for number in itertools.islice(_numbers, count):
        completion, row = PROGRAM, TESTS
        if name == "mathematics":
            completion, row = f"Together they are \\boxed{{{number}}}.", {"answer": str(number)}
        yield ScoreItem(f"g{number}", "sums", "", completion, "stop", row)


async def score(ask: Callable[[ScoreItem], Awaitable[Score]], items: Iterator[ScoreItem], clients: int) -> list[float]:
    """Score ``items``, ``clients`` at a time; return the seconds of each.

    Raises:
        RuntimeError: a sample has an error, or the wrong score.
    """
    seconds: list[float] = []

    async def client() -> None:
        for item in items:
            began = time.perf_counter()
            given = await ask(item)
            seconds.append(time.perf_counter() - began)
            if given.error or given.reward != 1:
                raise RuntimeError(f"a sample has the score {given}")

    await asyncio.gather(*(client() for _ in range(clients)))
    return seconds


def asking(pool: Pool) -> Callable[[ScoreItem], Awaitable[Score]]:
    """Return a function that has a worker of ``pool`` score a sample."""

    async def ask(item: ScoreItem) -> Score:
        return (await pool.score([item]))[0]

    return ask


async def measure(name: str, cores: int, rounds: int) -> dict[str, float]:
    """Return samples/s and the 99th percentile of a sample's time; for `code` on one core also executions of Python."""
    latencies: list[float] = []
    times: list[float] = []
    executions: list[float] = []
    async with Pool(evaluator(name), name, cores, 60.0) as pool:
        await score(asking(pool), samples(name, 4 * cores), PER_WORKER * cores)  # starts the zygotes
        for _ in range(rounds):
            began = time.perf_counter()
            latencies += await score(asking(pool), samples(name, SAMPLES[name]), PER_WORKER * cores)
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


async def client_share(rounds: int) -> dict[str, float]:
    """Return samples/s of the runner's client and of the workers of the same service, and the median of their ratio."""
    name = "mathematics"
    times: dict[str, list[float]] = {"pool": [], "client": []}
    async with Pool(evaluator(name), name, 1, 60.0) as pool, serving(name) as client:
        for _ in range(rounds + 1):
            for way, ask in (("pool", asking(pool)), ("client", client.score)):
                began = time.perf_counter()
                await score(ask, samples(name, SAMPLES[name]), FOR_CLIENT)
                times[way].append(time.perf_counter() - began)
    found = {way: spent[1:] for way, spent in times.items()}  # the first round starts the workers
    figures = {f"{way}_samples_per_second": SAMPLES[name] * rounds / sum(spent) for way, spent in found.items()}
    ratios = [pool / client for pool, client in zip(found["pool"], found["client"], strict=True)]
    return {**figures, "share": statistics.median(ratios)}


@contextlib.asynccontextmanager
async def serving(name: str) -> AsyncIterator[RewardClient]:
    """Start the service of a reward with one worker; yield the runner's client of it."""
    where = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "rljob.rewards.main", "--serve", f"benchmarks.rewards:{name.title()}", where]
    service = subprocess.Popen([*command, "1", "60"], env={**os.environ, "RLJOB_LOG_LEVEL": "WARNING"})
    try:
        async with service_session() as session:
            client = RewardClient(Reward(name=name, url=f"http://{where}"), f"http://{where}", session)
            await client.wait_until_reachable()
            yield client
            await client.close()
    finally:
        service.terminate()
        service.wait()


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
    os.sched_setaffinity(0, available)
    figures |= {f"mathematics_{figure}": value for figure, value in asyncio.run(client_share(options.rounds)).items()}
    targets = {
        "code_runs_over_fork_exec": target(figures.pop("code_1_runs_over_fork_exec"), ">=", 3.0),
        "client_share_of_service": target(figures.pop("mathematics_share"), ">=", 0.9),
    }
    report("rewards", figures, targets, options.keep)


if __name__ == "__main__":
    main()
