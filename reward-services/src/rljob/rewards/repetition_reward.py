"""Scorer of the reward ``repetition``: minus the share of repeated n-grams (Yeo et al., arXiv 2502.03373)."""

from __future__ import annotations

from collections.abc import Sequence

from rljob.api.rewards import deterministic
from rljob.api.rewards.kinds.repetition import RepetitionOptions
from rljob.api.tasks import Task


@deterministic
class RepetitionReward:
    """The metric ``repeated`` is the share of n-grams that occurred before in the completion.

    Args:
        options: the reward's ``config``.
        tasks: unused; every factory of a reward receives them.
    """

    def __init__(self, options: RepetitionOptions, tasks: Sequence[Task]) -> None:
        self._options = options

    def __call__(self, *, completion: str) -> tuple[float, dict[str, float]]:
        """Return reward and metric; a completion shorter than an n-gram repeats nothing."""
        options = self._options
        units: Sequence[str] = completion.lower().split() if options.unit == "words" else "".join(completion.split())
        count = len(units) - options.ngram + 1
        if count < 1:
            return 0.0, {"repeated": 0.0}
        repeated = 1 - len({tuple(units[i : i + options.ngram]) for i in range(count)}) / count
        excess = max(0.0, repeated - options.allowed) / (1 - options.allowed)
        return 0.0 - excess, {"repeated": repeated}
