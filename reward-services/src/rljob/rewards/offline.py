"""Scores recorded samples: `rljob reward check`.

python -m rljob.rewards.offline   of the job and the reward that the environment names

Reads RecordedSamples from standard input, one a line, and prints a CheckedSample for each whose task uses the reward.
Samples are scored one at a time in a worker, with its limits of time and memory.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterable
from typing import BinaryIO

import msgspec

from rljob.api.models import RLJobSpec
from rljob.api.roles import Reward
from rljob.api.text_escape import escape_block
from rljob.protocol.environment import read_environment, remove_token
from rljob.protocol.exit_codes import CONFIGURATION_ERROR
from rljob.protocol.score_messages import CheckedSample, RecordedSample
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
        await pool.wait_until_ready()
        if pool.not_ready:
            raise ValueError(f"reward {reward.name}: {pool.not_ready}")
        for line in lines:
            sample = decoder.decode(line)
            item = sample.item
            task = tasks[item.task]
            if reward.name not in (task.reward_of(item.problem, names), *(more.name for more in task.more_rewards)):
                continue
            began = time.perf_counter()
            [score] = await pool.score([item])
            seconds = time.perf_counter() - began
            recorded = sample.rewards.get(reward.name)
            found.append(
                CheckedSample(item.sample, item.task, recorded, score.reward, score.metrics, score.error, seconds)
            )
    return found


def main() -> int:
    """Print the scores; return the exit code."""
    with os.fdopen(os.dup(1), "wb") as output:
        os.dup2(2, 1)  # what the reward prints is no score
        return _print_scores(output)


def _print_scores(output: BinaryIO) -> int:
    try:
        environment = read_environment()
        remove_token()
        scores = asyncio.run(score_lines(environment.job.spec, reward_of(environment), sys.stdin.buffer))
    except ValueError as error:
        sys.stderr.write(escape_block(f"{error}\n"))
        return CONFIGURATION_ERROR
    encoder = msgspec.json.Encoder()
    for score in scores:
        output.write(encoder.encode(score) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
