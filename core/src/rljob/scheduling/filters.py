"""Group filters: which complete groups are trained (dynamic sampling)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GroupFilter:
    """The filter of a task.

    ``nonconstant``: rewards must differ; equal rewards give zero advantage (DAPO, arXiv 2503.14476). ``min_mean``,
    ``max_mean``: bounds of the mean reward.
    """

    nonconstant: bool = False
    min_mean: float = -math.inf
    max_mean: float = math.inf

    def rejection(self, rewards: Sequence[float]) -> str:
        """Return why a group with these rewards is not trained; empty: it is trained."""
        if self.nonconstant and min(rewards) == max(rewards):
            return "the group's rewards are all equal"
        mean = math.fsum(rewards) / len(rewards)
        if mean < self.min_mean:
            return f"the group's mean reward {mean:g} is below groupFilter.minMean {self.min_mean:g}"
        if mean > self.max_mean:
            return f"the group's mean reward {mean:g} is above groupFilter.maxMean {self.max_mean:g}"
        return ""
