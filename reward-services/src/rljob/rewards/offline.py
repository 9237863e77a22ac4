"""Scores recorded samples: `rljob reward check`.

python -m rljob.rewards.offline   of the job and the reward that the environment names

Reads RecordedSamples from standard input, one a line, and prints a CheckedSample for each whose task uses the reward;
with exit code 2, why there are none. What the reward prints and logs is on standard error. Samples are scored one at a
time in a worker, with its limits of time and memory.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterable
from typing import BinaryIO

import msgspec

from rljob.api.models import RLJobSpec
from rljob.api.roles import Reward
from rljob.protocol.environment import read_environment, remove_token
from rljob.protocol.exit_codes import CONFIGURATION_ERROR
from rljob.protocol.score_messages import SAMPLE_TRIES, CheckedSample, RecordedSample, Score, ScoreItem
from rljob.protocol.service_server import start_logging
from rljob.protocol.traceback_escape import escape_tracebacks
from rljob.rewards.main import make_evaluator
from rljob.rewards.pool import Pool
from rljob.rewards.sdk import reward_of


async def score_lines(spec: RLJobSpec, reward: Reward, lines: Iterable[bytes]) -> list[CheckedSample]:
    """Return the scores of recorded samples.

    Raises:
        ValueError: the reward cannot be made or set up.
    """
    evaluator = make_evaluator(spec, spec.rewards.index(reward))
    names = [each.name for each in spec.rewards]
    tasks = {task.name: task for task in spec.tasks}
    decoder, found = msgspec.json.Decoder(RecordedSample), []
    async with Pool(evaluator, reward.name, 1, reward.timeout_seconds, reward.worker_memory) as pool:
        await _set_up(pool)
        for line in lines:
            sample = decoder.decode(line)
            item = sample.item
            task = tasks[item.task]
            if reward.name not in (task.reward_of(item.problem, names), *(more.name for more in task.more_rewards)):
                continue
            score, seconds = await _scored(pool, item)
            recorded = sample.rewards.get(reward.name)
            found.append(
                CheckedSample(item.sample, item.task, recorded, score.reward, score.metrics, score.error, seconds)
            )
    return found


async def _set_up(pool: Pool) -> None:
    """Wait until a worker is set up.

    Raises:
        ValueError: the set-up of one failed.
    """
    await pool.wait_until_ready()
    if pool.not_ready:
        raise ValueError(f"reward {pool.name}: {pool.not_ready}")


async def _scored(pool: Pool, item: ScoreItem) -> tuple[Score, float]:
    """Return the score of a sample and the seconds that it took; ask again if it cannot be scored now."""
    for _ in range(SAMPLE_TRIES):
        await _set_up(pool)
        began = time.perf_counter()
        [score] = await pool.score([item])
        seconds = time.perf_counter() - began
        if not score.later:
            break
    return score, seconds


def main() -> int:
    """Print the scores, or why there are none; return the exit code."""
    start_logging("WARNING")
    escape_tracebacks()
    with os.fdopen(os.dup(0), "rb") as samples, os.fdopen(os.dup(1), "wb") as output, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # the reward reads no samples
        os.dup2(2, 1)  # what the reward prints is no score
        return _print_scores(samples, output)


def _print_scores(samples: BinaryIO, output: BinaryIO) -> int:
    try:
        environment = read_environment()
        remove_token()
        scores = asyncio.run(score_lines(environment.job.spec, reward_of(environment), samples))
    except ValueError as error:
        output.write(str(error).encode(errors="backslashreplace"))
        return CONFIGURATION_ERROR
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    encoder = msgspec.json.Encoder()
    for score in scores:
        output.write(encoder.encode(score) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
