"""Advantages: what each sample's reward says about it next to the others of its group.

Every rank computes them for the whole batch from the scalars that come with Train, so groups are never cut by
parallelism. One function per kind, named in ``ADVANTAGES``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

EPSILON = 1e-6


def group_normalized(rewards_G: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (R − mean) / (std + 1e-6) with the unbiased std; for a group of one, R (GRPO, arXiv 2402.03300)."""
    if len(rewards_G) == 1:
        return rewards_G.copy()
    return (rewards_G - rewards_G.mean()) / (rewards_G.std(ddof=1) + EPSILON)


def group_centered(rewards_G: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return R − mean (Dr. GRPO, arXiv 2503.20783)."""
    return rewards_G - rewards_G.mean()


ADVANTAGES: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "group_normalized": group_normalized,
    "group_centered": group_centered,
}
"""Value of ``algorithm.advantage`` → advantages of one group from its rewards."""


def advantages(kind: str, rewards: Sequence[float], groups: Sequence[str]) -> NDArray[np.float64]:
    """Return the advantage of each sample of a batch, in the batch's order.

    Args:
        kind: a key of ``ADVANTAGES``.
        rewards: reward of each sample.
        groups: name of each sample's group; members need not be neighbours.
    """
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    rewards_N = np.asarray(rewards, dtype=np.float64)
    result_N = np.empty_like(rewards_N)
    for indices in members.values():
        result_N[indices] = ADVANTAGES[kind](rewards_N[indices])
    return result_N
