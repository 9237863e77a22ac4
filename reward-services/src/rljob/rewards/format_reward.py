"""Scorer of the reward ``format``: 1 if the completion consists of the tags, else 0."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rljob.api.rewards import deterministic
from rljob.api.rewards.kinds.answer_format import FormatOptions
from rljob.api.tasks import Task


@deterministic
class FormatReward:
    """Looks for tags. A tag inside of another one is a second occurrence.

    Args:
        options: the reward's ``config``.
        tasks: unused; every factory of a reward receives them.
    """

    def __init__(self, options: FormatOptions, tasks: Sequence[Task]) -> None:
        self._options = options
        self._marks = [mark for tag in options.tags for mark in (f"<{tag}>", f"</{tag}>")]
        self._any_mark = re.compile("|".join(map(re.escape, self._marks)))

    def __call__(self, *, completion: str, finish: str) -> float:
        """Return the reward."""
        if self._options.finished and finish != "stop":
            return 0.0
        text = (self._marks[0] if self._options.opened else "") + completion
        if self._any_mark.findall(text) != self._marks:
            return 0.0
        outside_or_inside = [part.strip() for part in self._any_mark.split(text)]
        outside, inside = outside_or_inside[::2], outside_or_inside[1::2]
        return float(not any(outside) and all(inside))
