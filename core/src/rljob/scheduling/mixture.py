"""Selects the task of the next prompt, so that the *trained* groups follow the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DECAY = 0.9
"""Weight of the outcomes before a step against those of the step, in the acceptance rate: policies improve."""
MIN_RATE = 1 / 16
"""Lower bound of the acceptance rate: a task whose groups are all rejected must not take all places."""
MAX_REJECTIONS_IN_A_ROW = 256
"""Groups of a task that are rejected in a row, after which it starts no more groups than its weight entitles it to.
With an acceptance rate of MIN_RATE so many are never seen (6e-8)."""


@dataclass
class TaskShare:
    """Counters of one task.

    ``rows``: prompts taken. ``deficit``: groups that should have been trained so far, by weight, and were not.
    ``rate``: estimated fraction of its groups that are accepted. ``expected``: groups that will be trained of those
    that have started. ``accepted``, ``finished``: groups that the filter accepted, and all that ended; both decay.
    ``rejections_in_a_row``: groups that were rejected since the last step with an accepted one; -1 from the first
    accepted one of a step to its end, so that it does not depend on the order in which groups end.
    """

    rows: int = 0
    deficit: float = 0.0
    rate: float = 1.0
    expected: float = 0.0
    accepted: float = 0.0
    finished: float = 0.0
    rejections_in_a_row: int = 0

    @property
    def all_rejected(self) -> bool:
        """Whether so many groups were rejected in a row that more of them cannot make up for it."""
        return self.rejections_in_a_row >= MAX_REJECTIONS_IN_A_ROW


class Mixture:
    """Selects tasks by weight with deficit counters of trained groups. If all groups are accepted, the share of a task
    is exact to within one prompt at any time.

    Rate and deficit change only in :meth:`settle`, once for each step. Between two steps the tasks are a fixed
    sequence: at α = 0 they must not depend on the order in which groups end. A task whose groups are all rejected is
    owed nothing, and its groups count as if all were accepted: it adds at most the work of its weight to a step.

    Args:
        weights: task → weight, in the manifest's order.
        shares: task → counters of an earlier process; by default a new run.
    """

    def __init__(self, weights: Mapping[str, float], shares: Mapping[str, TaskShare] | None = None) -> None:
        total = sum(weights.values())
        self._weight = {task: weight / total for task, weight in weights.items()}
        self.shares = {task: (shares or {}).get(task) or TaskShare() for task in weights}
        self._changed: set[str] = set()

    def take_changed(self) -> dict[str, TaskShare]:
        """Return the counters that have changed since the last call, by task."""
        changed = {task: self.shares[task] for task in self.shares if task in self._changed} if self._changed else {}
        self._changed.clear()
        return changed

    def next(self) -> tuple[str, int]:
        """Take a prompt: return its task and row. Rows of a task count from 0."""
        shares, total = self.shares, sum(share.expected for share in self.shares.values()) + 1
        task = max(shares, key=lambda name: self._weight[name] * total + shares[name].deficit - shares[name].expected)
        share = shares[task]
        share.expected += share.rate
        share.rows += 1
        self._changed.add(task)
        return task, share.rows - 1

    def ended(self, task: str, accepted: bool) -> None:
        """Record that a group was accepted, or rejected for its rewards or a failed sample."""
        share = self.shares[task]
        share.finished += 1
        share.accepted += accepted
        if accepted:
            share.rejections_in_a_row = -1
        elif share.rejections_in_a_row >= 0:
            share.rejections_in_a_row += 1
        self._changed.add(task)

    def settle(self, trained: Mapping[str, int], complete: Mapping[str, int], open_: Mapping[str, int]) -> None:
        """Update the counters after a step.

        Args:
            trained: task → groups that the step trained.
            complete: task → accepted groups that wait for a batch.
            open_: task → groups that are not complete.
        """
        for share in self.shares.values():
            share.rejections_in_a_row = max(0, share.rejections_in_a_row)
        others = [task for task, share in self.shares.items() if not share.all_rejected]
        weight = sum(self._weight[task] for task in others)
        self._settle_deficits(trained, others, weight)
        for task in others:
            share = self.shares[task]
            share.rate = max(MIN_RATE, (share.accepted + 1) / (share.finished + 1))
            share.expected = complete.get(task, 0) + share.rate * open_.get(task, 0)
        expected = sum(self.shares[task].expected for task in others)
        for task, share in self.shares.items():
            if share.all_rejected:
                share.rate, share.expected = 1.0, self._weight[task] / (weight or 1.0) * expected
            share.accepted *= DECAY
            share.finished *= DECAY
        self._changed.update(self.shares)

    def _settle_deficits(self, trained: Mapping[str, int], others: Sequence[str], weight: float) -> None:
        """Update the deficits: ``others``, the tasks whose groups are not all rejected, share the batch by their
        weights, whose sum is ``weight``. None of them is ahead of the rest, and nothing is owed to the rest."""
        batch = sum(trained.values())
        for task in others:
            owed = self.shares[task].deficit + self._weight[task] / weight * batch - trained.get(task, 0)
            self.shares[task].deficit = max(-batch, min(batch, owed))
        if len(others) < len(self.shares):
            mean = sum(self.shares[task].deficit for task in others) / max(1, len(others))
            for share in self.shares.values():
                share.deficit = 0.0 if share.all_rejected else share.deficit - mean
