"""Scorer of the built-in reward ``reasoning_gym``: the dataset scores the text between <answer> and </answer>."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rljob.api.base import Model
from rljob.api.tasks import Task
from rljob.protocol.startup import lazy_imports

with lazy_imports("cellpylib"):  # cellpylib imports matplotlib, which takes as long as all of reasoning_gym
    from reasoning_gym.factory import create_dataset
    from reasoning_gym.utils import extract_answer


class ReasoningGymReward:
    """1 if the dataset gives the full score, else 0; the dataset's score is the metric ``partial``.

    Partial scores are not the reward, because many datasets give one to an answer that only contains the right answer.
    A few datasets use their config for scores, so each task has its own dataset, made before any sample is scored.

    Args:
        options: unused; the reward has no options.
        tasks: the tasks that use this reward.

    Raises:
        ValueError: a task names a dataset that reasoning-gym does not have.
    """

    def __init__(self, options: Model, tasks: Sequence[Task]) -> None:
        self._datasets = {}
        for task in tasks:
            gym = task.data.reasoning_gym
            assert gym is not None, "validation rejects a task with other data"
            self._datasets[task.name] = create_dataset(gym.dataset, **{**gym.config, "seed": 0, "size": 1})

    def __call__(self, *, completion: str, problem: dict[str, Any], task: str) -> tuple[float, dict[str, float]]:
        """Return reward and metric; ``problem`` is the row of the dataset: question, answer, metadata."""
        score = float(self._datasets[task].score_answer(extract_answer(completion), problem))
        return (1.0 if score >= 1 else 0.0), {"partial": score}
