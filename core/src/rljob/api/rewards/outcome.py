"""What a reward of a user may be or return besides a plain function and a number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class NotScored(Exception):
    """The sample cannot be scored; returned or raised by a reward, with the reason.

    The sample ends as failed with the reason and its group is replaced: a sample that is not scored never counts as 0.
    """


class Unavailable(Exception):
    """What the reward depends on does not answer now; raised by a reward, with the reason.

    The runner asks again until there is a score: the sample is not lost, no time limit counts the wait, and no other
    sample waits for it.
    """


@dataclass(frozen=True)
class Parts:
    """Several rewards of one sample. Its reward is their weighted sum; each is the metric ``reward/NAME``.

    ``values``: name → reward. ``weights``: name → factor; 1 for names that are absent. ``metrics``: further numbers.

    Raises:
        ValueError: there is no value, a weight without one, or a metric that has the name of a part.
    """

    values: Mapping[str, float]
    weights: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("the reward has no parts; give one, or return NotScored")
        for name in self.values:
            if f"reward/{name}" in self.metrics:
                raise ValueError(f"the metric 'reward/{name}' is the part {name!r}; give the metric another name")
        for name in self.weights:
            if name not in self.values:
                raise ValueError(f"weights name {name!r}, which is not one of the parts {', '.join(self.values)}")


def batch(scorer: F) -> F:
    """Mark a scorer, or ``__call__`` of a class, that scores several samples at once.

    Each of its parameters is a list with the values of the samples. It returns a list with a result for each sample.
    """
    scorer.scores_batches = True  # type: ignore[attr-defined]
    return scorer


def deterministic(scorer: F) -> F:
    """Mark a scorer, or a class, that always gives samples that are equal except for their id the same score.

    The runner asks for one of such samples and uses the score for the others.
    """
    scorer.deterministic = True  # type: ignore[attr-defined]
    return scorer


def is_deterministic(scorer: Any) -> bool:
    """Return whether a scorer is marked with :func:`deterministic`, or has a true attribute of this name."""
    return getattr(scorer, "deterministic", False) is True


def is_batch(scorer: Any) -> bool:
    """Return whether a scorer is marked with :func:`batch`."""
    called = vars(type(scorer)).get("__call__")
    return bool(getattr(scorer, "scores_batches", False) or getattr(called, "scores_batches", False))
