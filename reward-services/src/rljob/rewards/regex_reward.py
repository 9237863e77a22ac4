"""Scorer of the reward ``regex``: 1 if the completion matches, else 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rljob.api.rewards import deterministic
from rljob.api.rewards.kinds.regex_match import RegexOptions, row_pattern
from rljob.api.tasks import Task


@deterministic
class RegexReward:
    """Matches by Python's ``re``. The worker's time limit ends a match that backtracks without end.

    Args:
        options: the reward's ``config``.
        tasks: unused; every factory of a reward receives them.
    """

    def __init__(self, options: RegexOptions, tasks: Sequence[Task]) -> None:
        self._options = options

    def __call__(self, *, completion: str, problem: dict[str, Any]) -> float:
        """Return the reward.

        Raises:
            ValueError: the row has no regular expression.
        """
        pattern = row_pattern(problem, self._options)
        whole = self._options.part == "whole"
        return float((pattern.fullmatch(completion.strip()) if whole else pattern.search(completion)) is not None)
