"""Scorer of the reward ``combined``: the weighted sum of other built-in rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rljob.api.extensions import load
from rljob.api.rewards import REWARDS, NotScored, Parts, deterministic, is_deterministic
from rljob.api.rewards.combined import CombinedOptions, RewardPart
from rljob.api.tasks import Task
from rljob.rewards.evaluate import fields_of


class CombinedReward:
    """Scores a sample by each part. A sample that one part cannot score is not scored.

    Args:
        options: the reward's ``config``.
        tasks: the tasks that use the reward.

    Raises:
        ValueError: a part does not score the data of a task, or cannot be made.
    """

    def __init__(self, options: CombinedOptions, tasks: Sequence[Task]) -> None:
        self._parts = {part.name: _part_scorer(part, tasks) for part in options.parts}
        self._weights = {part.name: part.weight for part in options.parts}
        self.deterministic = all(map(is_deterministic, self._parts.values()))

    def __call__(self, **fields: Any) -> Parts:
        """Return the parts' rewards; their metrics are named PART/METRIC.

        Raises:
            NotScored: a part cannot score the sample.
        """
        values: dict[str, float] = {}
        metrics: dict[str, float] = {}
        for name, score in self._parts.items():
            try:
                values[name], more = score(fields)
            except Exception as error:  # a part may raise anything; without it there is no sum, and no score
                raise NotScored(f"part {name} raised {type(error).__name__}: {error}") from error
            metrics |= {f"{name}/{key}": value for key, value in more.items()}
        return Parts(values, self._weights, metrics)


def _part_scorer(
    part: RewardPart, tasks: Sequence[Task]
) -> Callable[[Mapping[str, Any]], tuple[float, Mapping[str, float]]]:
    """Return the function that scores the fields of a sample by a part: reward and metrics."""
    kind = REWARDS[part.builtin]
    for task in tasks:
        if not kind.accepts(task.data.sources):
            raise ValueError(
                f"part {part.name} is the builtin {part.builtin}, which scores {kind.accepted} data only, and the data "
                f"of task {task.name} are {' and '.join(task.data.sources)}; remove the part"
            )
    assert isinstance(kind.make, str), "the factory of a built-in reward is a reference"
    scorer = load({}, kind.make, f"part {part.name}")(kind.parse(part.config), tasks)
    names = fields_of(scorer, part.name)

    def score(fields: Mapping[str, Any]) -> tuple[float, Mapping[str, float]]:
        result = scorer(**{name: fields[name] for name in names})
        return result if isinstance(result, tuple) else (result, {})

    return deterministic(score) if is_deterministic(scorer) else score
