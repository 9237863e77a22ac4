"""Prints episodes of a scripted agent, to warm up a small model: one JSON list of [observation, action] a line.

python -m rljob.environments.demonstrations TASK EPISODES OPTIMAL SEED   of the job that the environment names

In an episode that is optimal (a fraction OPTIMAL of them) every action is the expert's, in the others it is random. An
episode has at most maxTurns actions. The rows are those of seeds that no split of `data: {seeds: {}}` has.

The trainer's image has this module and the built-in games without the packages of the service, for the initializer of
the example model. So this module imports no part of the service.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rljob.api.environments.load_environment import load_environment
from rljob.api.text_escape import escape_block
from rljob.protocol.environment import read_environment
from rljob.protocol.exit_codes import CONFIGURATION_ERROR

FIRST_SEED = 1 << 53  # seeds of rows are below


async def demonstrate(factory: Callable[[], Any], turns: int, optimal: bool, seed: int) -> list[tuple[str, str]]:
    """Return the observations and actions of one episode.

    Args:
        factory: makes the environment, which has ``actions`` and ``expert``.
        turns: actions, at most.
        optimal: whether the expert acts; else actions are random.
        seed: of the row, the episode and the agent.
    """
    made, chance = factory(), random.Random(seed)
    observation, _ = await _result(made.reset(seed, {"seed": FIRST_SEED + seed}))
    played: list[tuple[str, str]] = []
    ended = False
    while not ended and len(played) < turns:
        action = (made.expert() if optimal else None) or chance.choice(made.actions)
        played.append((observation, action))
        observation, _, terminated, truncated, _ = await _result(made.step(action))
        ended = terminated or truncated
    return played


async def _result(value: Any) -> Any:
    """Return what a function or an async function of the environment returned."""
    return await value if inspect.isawaitable(value) else value


def main() -> int:
    """Print the episodes; return the exit code."""
    try:
        for episode in _episodes(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])):
            sys.stdout.write(json.dumps(episode) + "\n")
    except ValueError as error:
        sys.stderr.write(escape_block(f"{error}\n"))
        return CONFIGURATION_ERROR
    return 0


def _episodes(name: str, count: int, optimal: float, seed: int) -> Iterator[list[tuple[str, str]]]:
    spec = read_environment().job.spec
    task = next(task for task in spec.tasks if task.name == name)
    acts_in = task.environment
    assert acts_in is not None, "the caller names a task with an environment"
    i = next(i for i, entry in enumerate(spec.environments) if entry.name == acts_in.name)
    loaded = load_environment(spec.environments[i], f"spec.environments[{i}]")
    if loaded is None:
        raise ValueError(f"spec.environments[{i}]: {spec.environments[i].name} runs in its own program; name a builtin")
    factory = loaded.factory()
    if not (hasattr(factory(), "expert") and hasattr(factory(), "actions")):
        raise ValueError(f"spec.environments[{i}]: {spec.environments[i].name} has no expert; name a builtin")

    async def play() -> list[list[tuple[str, str]]]:
        chance = random.Random(seed)
        return [
            await demonstrate(factory, acts_in.max_turns, chance.random() < optimal, (seed << 24) + number)
            for number in range(count)
        ]

    yield from asyncio.run(play())


if __name__ == "__main__":
    sys.exit(main())
