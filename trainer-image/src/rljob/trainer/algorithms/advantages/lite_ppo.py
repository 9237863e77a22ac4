"""Advantage with the mean of the group and the standard deviation of the batch."""

from __future__ import annotations

import numpy as np

from rljob.trainer.algorithms.advantages.base import Floats, Scalars, from_scalars
from rljob.trainer.algorithms.advantages.group import EPSILON, centered


@from_scalars
def lite_ppo(scalars: Scalars) -> Floats:
    """Return (R − mean of the group) / (std of the batch + 1e-6) with the unbiased std (Lite PPO, arXiv 2508.08221)."""
    rewards_N = scalars.rewards_N
    advantages_N = np.zeros_like(rewards_N)
    if len(rewards_N) > 1:
        for members in scalars.by_group():
            advantages_N[members] = centered(rewards_N[members]) / (rewards_N.std(ddof=1) + EPSILON)
    return advantages_N
