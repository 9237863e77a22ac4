"""A person plays an environment in the terminal: `rljob env play`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

from rljob.api.text_escape import escape_block
from rljob.environments.episode import Calls, Episode
from rljob.environments.sdk_types import EpisodeError
from rljob.protocol.episode_messages import Observation

SECONDS = 3600.0


def play(factory: Callable[[], Any], seed: int) -> int:
    """Play one episode with actions from standard input, one a line; return the exit code."""
    try:
        total = asyncio.run(_play(factory, seed))
    except EpisodeError as error:
        sys.stderr.write(escape_block(f"{error}\n"))
        return 1
    except KeyboardInterrupt:
        return 130
    sys.stdout.write(f"reward of the episode: {total:g}\n")
    return 0


async def _play(factory: Callable[[], Any], seed: int) -> float:
    episode = Episode(factory, Calls("play", SECONDS))
    found = await episode.reset(seed, {"seed": seed})
    total = 0.0
    sys.stdout.write(escape_block(f"{found.observation}\n"))
    while not found.ended:
        sys.stdout.write("action> ")
        sys.stdout.flush()
        line = sys.stdin.readline()
        if not line:
            sys.stdout.write("\n")
            break
        found = await episode.step(line.rstrip("\n"))
        total += found.reward
        sys.stdout.write(escape_block(f"{found.observation}\n{_summary(found)}\n"))
    if episode.closable:
        await episode.close()
    return total


def _summary(found: Observation) -> str:
    end = "; terminated" if found.terminated else "; truncated" if found.truncated else ""
    numbers = "".join(f", {name} {value:g}" for name, value in (found.metrics | found.means).items())
    return f"reward {found.reward:g}{numbers}{end}"
