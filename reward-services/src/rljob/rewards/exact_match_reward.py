"""Scorer of the reward ``exact_match``: 1 if the answer in the completion equals a column of the row, else 0."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from rljob.api.rewards import deterministic
from rljob.api.rewards.kinds.exact_match import ExactMatchOptions
from rljob.api.tasks import Task
from rljob.api.templates import text_of


@deterministic
class ExactMatchReward:
    """Compares text without surrounding white space. The metric ``answered`` is 1 if the completion has an answer.

    Args:
        options: the reward's ``config``.
        tasks: unused; every factory of a reward receives them.
    """

    def __init__(self, options: ExactMatchOptions, tasks: Sequence[Task]) -> None:
        self._options = options

    def __call__(self, *, completion: str, problem: dict[str, Any]) -> tuple[float, dict[str, float]]:
        """Return reward and metric.

        Raises:
            ValueError: the row lacks the column, or the column holds neither text nor a number.
        """
        expected, answer = text_of(problem, self._options.column), self._extract(completion)
        if answer is None:
            return 0.0, {"answered": 0.0}
        return float(self._normalized(answer) == self._normalized(expected)), {"answered": 1.0}

    def _extract(self, completion: str) -> str | None:
        if self._options.extract is None:
            return completion
        for last in deque(self._options.extract.finditer(completion), maxlen=1):
            answer: str | None = last.group(1 if self._options.extract.groups else 0)
            return answer
        return None

    def _normalized(self, text: str) -> str:
        return text.strip().casefold() if self._options.ignore_case else text.strip()
