"""Selects the task of the next prompt."""

from __future__ import annotations

from collections.abc import Mapping


class Mixture:
    """Selects tasks by weight with deficit counters: at any time the share of a task is exact to within one prompt.

    Args:
        weights: task → weight, in the manifest's order.
        taken: task → prompts already taken from it (after a restart).
    """

    def __init__(self, weights: Mapping[str, float], taken: Mapping[str, int] | None = None) -> None:
        total = sum(weights.values())
        self._share = {task: weight / total for task, weight in weights.items()}
        self._taken = {task: (taken or {}).get(task, 0) for task in weights}

    def next(self) -> tuple[str, int]:
        """Take a prompt: return its task and row. Rows of a task count from 0."""
        due = sum(self._taken.values()) + 1
        task = max(self._share, key=lambda name: self._share[name] * due - self._taken[name])
        row = self._taken[task]
        self._taken[task] += 1
        return task, row
