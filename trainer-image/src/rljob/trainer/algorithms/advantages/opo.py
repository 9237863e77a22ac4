"""Advantage with the optimal baseline of a group."""

from __future__ import annotations

import numpy as np

from rljob.trainer.algorithms.advantages.base import Floats, Scalars, from_scalars


@from_scalars
def opo(scalars: Scalars) -> Floats:
    """Return R − Σ length·R / Σ length over the group, with lengths in the model's tokens (OPO, arXiv 2505.23585).

    It is exactly 0 for equal rewards, and R in a group without tokens.
    """
    advantages_N = scalars.rewards_N.copy()
    for members in scalars.by_group():
        rewards_G, lengths_G = scalars.rewards_N[members], scalars.lengths_N[members]
        if np.ptp(rewards_G) == 0:
            advantages_N[members] = 0
        elif lengths_G.sum() > 0:
            advantages_N[members] = rewards_G - (lengths_G * rewards_G).sum() / lengths_G.sum()
    return advantages_N
