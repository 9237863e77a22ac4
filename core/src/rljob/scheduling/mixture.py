"""Selects the task of the next prompt, so that the *trained* groups follow the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

DECAY = 0.9
"""Weight of the outcomes before a step against those of the step, in the acceptance rate: policies improve."""
MIN_RATE = 1 / 16
"""Lower bound of the acceptance rate: a task whose groups are all rejected must not take all places."""


@dataclass
class TaskShare:
    """Counters of one task.

    ``rows``: prompts taken. ``deficit``: groups that should have been trained so far, by weight, and were not.
    ``rate``: estimated fraction of its groups that are accepted. ``expected``: groups that will be trained of those
    that have started. ``accepted``, ``finished``: groups that the filter accepted, and all that ended; both decay.
    """

    rows: int = 0
    deficit: float = 0.0
    rate: float = 1.0
    expected: float = 0.0
    accepted: float = 0.0
    finished: float = 0.0


class Mixture:
    """Selects tasks by weight with deficit counters of trained groups. If all groups are accepted, the share of a task
    is exact to within one prompt at any time.

    Rate and deficit change only in :meth:`settle`, once for each step. Between two steps the tasks are a fixed
    sequence: at α = 0 they must not depend on the order in which groups end.

    Args:
        weights: task → weight, in the manifest's order.
        shares: task → counters of an earlier process; by default a new run.
    """

    def __init__(self, weights: Mapping[str, float], shares: Mapping[str, TaskShare] | None = None) -> None:
        total = sum(weights.values())
        self._weight = {task: weight / total for task, weight in weights.items()}
        self.shares = {task: (shares or {}).get(task) or TaskShare() for task in weights}

    def next(self) -> tuple[str, int]:
        """Take a prompt: return its task and row. Rows of a task count from 0."""
        shares, total = self.shares, sum(share.expected for share in self.shares.values()) + 1
        task = max(shares, key=lambda name: self._weight[name] * total + shares[name].deficit - shares[name].expected)
        share = shares[task]
        share.expected += share.rate
        share.rows += 1
        return task, share.rows - 1

    def ended(self, task: str, accepted: bool) -> None:
        """Record that a group was accepted, or rejected for its rewards or a failed sample."""
        self.shares[task].finished += 1
        self.shares[task].accepted += accepted

    def settle(self, trained: Mapping[str, int], complete: Mapping[str, int], open_: Mapping[str, int]) -> None:
        """Update the counters after a step.

        Args:
            trained: task → groups that the step trained.
            complete: task → accepted groups that wait for a batch.
            open_: task → groups that are not complete.
        """
        batch = sum(trained.values())
        for task, share in self.shares.items():
            owed = share.deficit + self._weight[task] * batch - trained.get(task, 0)
            share.deficit = max(-batch, min(batch, owed))
            share.rate = max(MIN_RATE, (share.accepted + 1) / (share.finished + 1))
            share.expected = complete.get(task, 0) + share.rate * open_.get(task, 0)
            share.accepted *= DECAY
            share.finished *= DECAY
