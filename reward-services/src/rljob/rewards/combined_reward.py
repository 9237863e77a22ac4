"""Scorer of the reward ``combined``: the weighted sum of other built-in rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rljob.api.extensions import load
from rljob.api.rewards import REWARDS, NotScored, Parts, Scorer, Unavailable, is_deterministic
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
        self._fields = {name: fields_of(scorer, name) for name, scorer in self._parts.items()}
        self._weights = {part.name: part.weight for part in options.parts}
        self.deterministic = all(map(is_deterministic, self._parts.values()))

    def set_time_limit(self, seconds: float) -> None:
        """Set the time after which the service ends a sample."""
        for scorer in self._parts.values():
            if callable(set_time_limit := getattr(scorer, "set_time_limit", None)):
                set_time_limit(seconds)

    def __call__(self, **fields: Any) -> Parts:
        """Return the parts' rewards; their metrics are named PART/METRIC.

        Raises:
            NotScored: a part cannot score the sample.
            Unavailable: a part cannot score it now.
        """
        values: dict[str, float] = {}
        metrics: dict[str, float] = {}
        for name, scorer in self._parts.items():
            try:
                result: Any = scorer(**{field: fields[field] for field in self._fields[name]})
                values[name], more = result if isinstance(result, tuple) else (result, {})
            except Unavailable as error:
                raise Unavailable(f"part {name}: {error}") from error
            except Exception as error:  # a part may raise anything; without it there is no sum, and no score
                raise NotScored(f"part {name} raised {type(error).__name__}: {error}") from error
            metrics |= {f"{name}/{key}": value for key, value in more.items()}
        return Parts(values, self._weights, metrics)


def _part_scorer(part: RewardPart, tasks: Sequence[Task]) -> Scorer:
    kind = REWARDS[part.builtin]
    for task in tasks:
        if not kind.accepts(task.data.sources):
            raise ValueError(
                f"part {part.name} is the builtin {part.builtin}, which scores {kind.accepted} data only, and the data "
                f"of task {task.name} are {' and '.join(task.data.sources)}; remove the part"
            )
    assert isinstance(kind.make, str), "the factory of a built-in reward is a reference"
    scorer: Scorer = load({}, kind.make, f"part {part.name}")(kind.parse(part.config), tasks)
    return scorer
