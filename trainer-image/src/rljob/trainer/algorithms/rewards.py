"""Rewards of a sample by token.

Shapes: L tokens of a sample, prompt included.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


def token_rewards(
    mask_L: NDArray[np.bool_], reward: float, segments: Iterable[tuple[int, float]] = ()
) -> NDArray[np.float64]:
    """Return the reward that arrives at each token; their sum is the sample's reward.

    A segment's reward arrives at its last token. Without segments, and for what their rewards leave of the sample's
    reward, it is the last token that the model wrote.

    Args:
        mask_L: where the model wrote.
        reward: of the sample.
        segments: end (exclusive) and reward of segments of the sample, for example of turns.
    """
    rewards_L = np.zeros(len(mask_L), np.float64)
    rest = reward
    for end, value in segments:
        rewards_L[end - 1] += value
        rest -= value
    if mask_L.any() and rest != 0:
        rewards_L[np.flatnonzero(mask_L)[-1]] += rest
    return rewards_L
