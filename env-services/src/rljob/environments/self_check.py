"""Checks an environment with random and scripted agents: `rljob env check`."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from rljob.api.text_escape import escape_json, escape_line
from rljob.environments.episode import Calls, Episode
from rljob.environments.sdk_types import EpisodeError
from rljob.protocol.episode_messages import Observation

SECONDS = 60.0
STRANGE_ACTIONS = ("", "\x00", "{}", "<answer></answer>", "é" * 1000)
"""Texts that a model may write; an environment must not raise an exception for them."""
LEAK_BYTES = 20 << 10
"""Growth of the memory for each episode that counts as a leak."""
Agent = Callable[[Any, random.Random], str]


def verify(factory: Callable[[], Any], episodes: int, steps: int, output: str) -> int:
    """Play episodes and print what was found; return the exit code: 1 if the environment has a defect.

    Args:
        factory: makes the environment of an episode.
        episodes: of each agent.
        steps: of an episode, at most.
        output: text or json.
    """
    found = asyncio.run(examine(factory, episodes, steps))
    if output == "json":
        sys.stdout.write(escape_json(json.dumps(found)) + "\n")
    else:
        lines = [f"{name}: {_text(value)}" for name, value in found.items() if name != "problems"]
        lines += [f"problem: {problem}" for problem in found["problems"]] or ["no problems"]
        sys.stdout.writelines(f"{escape_line(line)}\n" for line in lines)
    return 1 if found["problems"] else 0


async def examine(factory: Callable[[], Any], episodes: int, steps: int) -> dict[str, Any]:
    """Return scores of the agents, speed, memory of an episode, and the problems, one sentence each."""
    try:
        agents = _agents(factory, Calls("checked", SECONDS))
    except EpisodeError as error:
        return {"problems": [str(error)]}
    problems: list[str] = []
    found: dict[str, Any] = {}
    for name, agent in agents.items():
        began, played = time.perf_counter(), []
        for seed in range(episodes):
            try:
                played.append(await _episode(factory, agent, seed, steps))
            except EpisodeError as error:
                problems.append(f"agent {name}, seed {seed}: {error}")
        if played:
            made = sum(len(observations) - 1 for observations in played)
            found[name] = _scores(played) | {"steps_per_second": made / max(1e-9, time.perf_counter() - began)}
    problems += await _determinism(factory, agents["random"], min(episodes, 8), steps)
    problems += await _strange_actions(factory)
    grown = await _growth(factory, agents["random"], episodes, steps)
    found["bytes_kept_per_episode"] = grown
    if grown > LEAK_BYTES:
        problems.append(f"an ended episode keeps {grown:,} bytes; release its memory in close(), or when it ends")
    return found | {"problems": list(dict.fromkeys(problems))}


def _agents(factory: Callable[[], Any], calls: Calls) -> dict[str, Agent]:
    """Return the random agent, and the scripted one if the environment has a method ``expert``.

    Raises:
        EpisodeError: the environment failed.
    """

    def actions(environment: Any) -> list[str]:
        return list(getattr(environment, "actions", []))

    def expert(environment: Any, chance: random.Random) -> str:
        return environment.expert() or _random(choices, chance)

    probe = calls.call_here(factory)
    choices = calls.call_here(actions, probe)
    agents: dict[str, Agent] = {"random": lambda _, chance: _random(choices, chance)}
    return agents | {"scripted": expert} if calls.call_here(hasattr, probe, "expert") else agents


async def _episode(factory: Callable[[], Any], agent: Agent, seed: int, steps: int) -> list[Observation]:
    made: list[Any] = []

    def make() -> Any:
        made.append(factory())
        return made[0]

    make.__name__ = factory.__name__

    chance, calls = random.Random(seed), Calls("checked", SECONDS)
    episode = Episode(make, calls)
    observations = [await episode.reset(seed, {"seed": seed})]
    while not observations[-1].ended and len(observations) <= steps:
        observations.append(await episode.step(calls.call_here(agent, made[0], chance)))
    if episode.closable:
        await episode.close()
    return observations


async def _determinism(factory: Callable[[], Any], agent: Agent, episodes: int, steps: int) -> list[str]:
    """Play episodes twice, the second time all together, so that a shared random state shows."""
    try:
        first = [await _episode(factory, agent, seed, steps) for seed in range(episodes)]
        second = await asyncio.gather(*(_episode(factory, agent, seed, steps) for seed in range(episodes)))
    except EpisodeError:
        return []  # reported by the agents
    return [
        f"seed {seed} gives another episode when it is played again; use random.Random(seed) of the episode's own"
        for seed, (one, two) in enumerate(zip(first, second, strict=True))
        if one != two
    ][:1]


async def _strange_actions(factory: Callable[[], Any]) -> list[str]:
    problems = []
    for action in STRANGE_ACTIONS:
        episode = Episode(factory, Calls("checked", SECONDS))
        try:
            if not (await episode.reset(0, {"seed": 0})).ended:
                await episode.step(action)
        except EpisodeError as error:
            problems.append(f"the action {action[:20]!r}: {error}; count it as invalid instead")
    return problems


async def _growth(factory: Callable[[], Any], agent: Agent, episodes: int, steps: int) -> int:
    """Return the bytes by which the process grows for each episode, after as many episodes as warm-up."""
    try:
        for seed in range(episodes):
            await _episode(factory, agent, seed, steps)
        gc.collect()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for seed in range(episodes):
            await _episode(factory, agent, seed, steps)
    except EpisodeError:
        return 0  # reported by the agents
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 // max(1, episodes)


def _random(actions: list[str], chance: random.Random) -> str:
    return chance.choice(actions) if actions else ""


def _scores(played: list[list[Observation]]) -> dict[str, float]:
    rewards = [sum(each.reward for each in observations) for observations in played]
    scores = {"mean_reward": statistics.fmean(rewards)}
    scores["mean_steps"] = statistics.fmean(len(observations) - 1 for observations in played)
    last = [observations[-1].metrics for observations in played]
    for name in sorted({name for metrics in last for name in metrics}):
        scores[name] = statistics.fmean(metrics.get(name, 0.0) for metrics in last)
    return scores


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {number:,.4g}" for name, number in value.items())
    return f"{value:,}"
