"""The built-in reward ``reasoning_gym``: the dataset's own verdict on the answer between <answer> and </answer>."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rljob.api.tasks import Task
from rljob.protocol.startup import lazy_imports

with lazy_imports("cellpylib"):  # it imports matplotlib, which takes as long as all of reasoning_gym
    from reasoning_gym.factory import create_dataset
    from reasoning_gym.utils import extract_answer


class ReasoningGymReward:
    """1 if the dataset gives full marks, else 0; the marks themselves are the metric ``partial``.

    Partial marks are not the reward because many datasets give some for an answer that merely contains the right one.
    A few datasets judge by their config, so there is one for each task, made before any sample is scored.

    Args:
        tasks: the tasks that use this reward.

    Raises:
        ValueError: a task names a dataset that reasoning-gym has not.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._datasets = {}
        for task in tasks:
            gym = task.data.reasoning_gym
            assert gym is not None, "a task of other data is refused with the manifest"
            self._datasets[task.name] = create_dataset(gym.dataset, **{**gym.config, "seed": 0, "size": 1})

    def __call__(self, *, completion: str, problem: dict[str, Any], task: str) -> tuple[float, dict[str, float]]:
        """Return reward and metric; ``problem`` is the row as the dataset gave it: question, answer, metadata."""
        marks = float(self._datasets[task].score_answer(extract_answer(completion), problem))
        return (1.0 if marks >= 1 else 0.0), {"partial": marks}
