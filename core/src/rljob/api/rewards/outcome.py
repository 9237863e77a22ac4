"""What a reward may return besides a number: named parts, or that it could not score the sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


class NotScored(Exception):
    """The sample cannot be scored; returned or raised by a reward, with the reason.

    The sample ends as failed with the reason and its group is replaced: a sample that is not scored never counts as 0.
    """


@dataclass(frozen=True)
class Parts:
    """Several rewards of one sample. Its reward is their weighted sum; each is the metric ``reward/NAME``.

    ``values``: name → reward. ``weights``: name → factor; 1 for names that are absent. ``metrics``: further numbers.
    """

    values: Mapping[str, float]
    weights: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.weights:
            if name not in self.values:
                raise ValueError(f"weights name {name!r}, which is not one of the parts {', '.join(self.values)}")
