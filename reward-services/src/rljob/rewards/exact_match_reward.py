"""The built-in reward ``exact_match``: 1 when the answer in the completion equals a column of the row, else 0."""

from __future__ import annotations

from collections import deque
from typing import Any

from rljob.api.builtin_rewards import ExactMatch
from rljob.api.templates import text_of


class ExactMatchReward:
    """Compares text without the white space around it; the metric ``answered`` is 1 when there is an answer at all.

    Args:
        options: the reward's ``config``.
    """

    def __init__(self, options: ExactMatch) -> None:
        self._options = options

    def __call__(self, *, completion: str, problem: dict[str, Any]) -> tuple[float, dict[str, float]]:
        """Return reward and metric.

        Raises:
            ValueError: the row lacks the column, or it holds neither text nor a number.
        """
        right, given = text_of(problem, self._options.column), self._extract(completion)
        if given is None:
            return 0.0, {"answered": 0.0}
        return float(self._plain(given) == self._plain(right)), {"answered": 1.0}

    def _extract(self, completion: str) -> str | None:
        if self._options.extract is None:
            return completion
        for last in deque(self._options.extract.finditer(completion), maxlen=1):
            found: str | None = last.group(1 if self._options.extract.groups else 0)
            return found
        return None

    def _plain(self, text: str) -> str:
        return text.strip().casefold() if self._options.ignore_case else text.strip()
