"""The built-in environment ``reasoning_gym``: one problem of a dataset of reasoning-gym, in one or several attempts.

A row of `data: {reasoningGym: …}` is the problem. From a row with only a seed, as `rljob env check` has, a problem is
generated. The dataset scores the answer between <answer> and </answer>.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Mapping
from typing import Any

from rljob.api.environments.kinds.gym_problems import ReasoningGymOptions
from rljob.environments.action_text import seed_of
from rljob.environments.sdk_types import Info, StepResult
from rljob.protocol.startup import lazy_imports

with lazy_imports("cellpylib"):  # cellpylib imports matplotlib, which takes as long as all of reasoning_gym
    from reasoning_gym.factory import DATASETS, create_dataset
    from reasoning_gym.utils import extract_answer

_SEEDS = 2**31 - 1
_GENERATING = threading.Lock()
"""Held while a problem is generated: some datasets use random states of their module."""


class ReasoningGymProblems:
    """One problem. It is solved with the dataset's full score; the score itself is the metric ``partial``.

    Args:
        options: dataset and number of attempts.

    Raises:
        ValueError: reasoning-gym has no such dataset, or the dataset refuses the parameters.
    """

    def __init__(self, options: ReasoningGymOptions) -> None:
        self._options = options
        self._dataset = _dataset(options.dataset, json.dumps(options.parameters, sort_keys=True))
        self._problem: Mapping[str, Any] = {}
        self._attempts = 0

    def reset(self, seed: int, row: Mapping[str, Any]) -> tuple[str, Info]:
        """Return the question of the row.

        Raises:
            ValueError: the row is of another dataset.
        """
        self._problem = row if "question" in row else self._generate(seed_of(row))
        source = (self._problem.get("metadata") or {}).get("source_dataset")
        if source != self._options.dataset:
            raise ValueError(
                f"the row is of the dataset {source!r}; name the dataset of the rows, {self._options.dataset}, in "
                "data.reasoningGym.dataset and in the config of the environment"
            )
        self._attempts = 0
        return self._problem["question"], {}

    def step(self, action: str) -> StepResult:
        """Score an answer. A text without <answer> and </answer> is not right."""
        score = float(self._dataset.score_answer(extract_answer(action), self._problem))
        self._attempts += 1
        solved = score >= 1
        metrics = {"success": solved, "partial": score, "attempts": self._attempts}
        truncated = not solved and self._attempts >= self._options.attempts
        return "Right." if solved else self._options.wrong, float(solved), solved, truncated, {"metrics": metrics}

    def expert(self) -> str:
        """Return the right answer."""
        return f"<answer>{self._problem['answer']}</answer>"

    def _generate(self, seed: int) -> Mapping[str, Any]:
        options = self._options
        with _GENERATING:
            problem: Mapping[str, Any] = create_dataset(
                options.dataset, **{**options.parameters, "seed": seed % _SEEDS, "size": 1}
            )[0]
        return problem


@functools.cache
def _dataset(name: str, parameters: str) -> Any:
    """Return the dataset that scores answers; a few use their parameters for scores.

    Raises:
        ValueError: there is none, or it refuses the parameters.
    """
    if name not in DATASETS:
        raise ValueError(f"dataset: there is no dataset {name!r} in reasoning-gym; name one that it has")
    try:
        return create_dataset(name, **{**json.loads(parameters), "seed": 0, "size": 1})
    except Exception as error:  # datasets check their parameters differently: assert, TypeError, ValueError
        raise ValueError(f"parameters: {name} refuses them: {error}; correct the parameter") from error
