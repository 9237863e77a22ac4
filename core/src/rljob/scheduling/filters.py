"""Group filters: which complete groups are trained (dynamic sampling)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rljob.scheduling.groups import Cause


class Rejection(NamedTuple):
    """Why a group is not trained: a sentence, and its kind for counters."""

    reason: str
    cause: Cause


@dataclass(frozen=True)
class GroupFilter:
    """The filter of a task.

    ``nonconstant``: rewards must differ; equal rewards give zero advantage (DAPO, arXiv 2503.14476). ``min_mean``,
    ``max_mean``: bounds of the mean reward. ``function``: module:attribute of a user-written filter; empty: there is
    none. It decides about the groups that the other fields accept: see
    :meth:`rljob.scheduling.scheduler.Scheduler.decide`.
    """

    nonconstant: bool = False
    min_mean: float = -math.inf
    max_mean: float = math.inf
    function: str = ""

    def rejection(self, rewards: Sequence[float]) -> Rejection | None:
        """Return why a group with these rewards is not trained; None: it is, unless ``function`` rejects it."""
        if self.nonconstant and min(rewards) == max(rewards):
            return Rejection("the group's rewards are all equal", "equal_rewards")
        mean = math.fsum(rewards) / len(rewards)
        if mean < self.min_mean:
            reason = f"the group's mean reward {mean:g} is below groupFilter.minMean {self.min_mean:g}"
            return Rejection(reason, "mean_below")
        if mean > self.max_mean:
            reason = f"the group's mean reward {mean:g} is above groupFilter.maxMean {self.max_mean:g}"
            return Rejection(reason, "mean_above")
        return None
