"""Advantages of a sample from the rewards of its group."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rljob.trainer.algorithms.advantages.base import per_group

EPSILON = 1e-6


@per_group
def group_normalized(rewards_G: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (R − mean) / (std + 1e-6) with the unbiased std; for a group of one, R (GRPO, arXiv 2402.03300)."""
    if len(rewards_G) == 1:
        return rewards_G.copy()
    return normalized(rewards_G)


@per_group
def group_centered(rewards_G: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return R − mean (Dr. GRPO, arXiv 2503.20783)."""
    return centered(rewards_G)


@per_group
def rloo(rewards_G: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return R minus the mean of the others, (R − mean)·G / (G − 1); for a group of one, 0 (RLOO, arXiv 2402.14740)."""
    return centered(rewards_G) * (len(rewards_G) / max(1, len(rewards_G) - 1))


@per_group
def reward(rewards_G: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return R: REINFORCE without a baseline."""
    return rewards_G.copy()


@per_group
def zero(rewards_G: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return 0: rewards are not used."""
    return np.zeros_like(rewards_G)


def normalized(rewards_G: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (R − mean) / (std + 1e-6) of at least two rewards, with the unbiased std."""
    return centered(rewards_G) / (rewards_G.std(ddof=1) + EPSILON)


def centered(rewards_G: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return R − mean; exactly 0 for equal rewards, whose mean may be rounded."""
    return np.zeros_like(rewards_G) if np.ptp(rewards_G) == 0 else rewards_G - rewards_G.mean()
