"""Group filters: which complete groups are trained (dynamic sampling)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

GroupFilter = Callable[[Sequence[float]], bool]


def accept_all(rewards: Sequence[float]) -> bool:
    """Accept every group."""
    return True


def nonconstant(rewards: Sequence[float]) -> bool:
    """Accept groups whose rewards differ; equal rewards give zero advantage (DAPO, arXiv 2503.14476)."""
    return min(rewards) != max(rewards)


FILTERS: dict[str, GroupFilter] = {"none": accept_all, "nonconstant": nonconstant}
