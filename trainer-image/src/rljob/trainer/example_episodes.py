"""Episodes for the warm-up of the example model in an environment: played by a scripted agent in another process.

A process of the environment's own package plays them, because processes never import each other's packages.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TypeAlias

from rljob.api.tasks import Task
from rljob.api.templates import fill

Segments: TypeAlias = list[tuple[str, bool]]
"""Text of an example in order; True: the model is to write it."""

OPTIMAL = 0.4
"""Fraction of optimal episodes. The others are random: they teach the format, so the model learns to act by RL only."""


def draw_episodes(task: Task, count: int, seed: int, end: str) -> list[Segments]:
    """Return the text of episodes as the loop `environment` makes it, every answer with ``end``.

    Raises:
        ValueError: the environment has no scripted agent, or the task has messages.
    """
    if task.prompt is None or task.environment is None:
        raise ValueError("the example model needs a task with a plain prompt; set prompt instead of messages")
    arguments = [task.name, str(count), str(OPTIMAL), str(seed)]
    command = [sys.executable, "-m", "rljob.environments.demonstrations", *arguments]
    played = subprocess.run(command, capture_output=True, text=True)
    if played.returncode:
        raise ValueError(f"the environment gives no examples: {played.stderr.strip()}")
    examples = []
    for line in played.stdout.splitlines():
        segments: Segments = []
        for observation, action in json.loads(line):
            template = task.environment.observation if segments else task.prompt
            segments += [(fill(template, {"observation": observation}), False), (f"{action}{end}", True)]
        examples.append(segments)
    return examples
