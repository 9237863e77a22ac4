"""Rewards of a sample by token.

Shapes: L tokens of a sample, prompt included.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from rljob.protocol.messages import Segment


def token_rewards(segments: Iterable[Segment], mask_L: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the reward that arrives at each token (L,); their sum is the sample's reward.

    The reward of a segment arrives at the last token that the model wrote up to the segment's end. The reward of a turn
    without tokens goes to the turn before it; before the first written token, to that token. A sample in which the
    model wrote nothing has no token for a reward.

    Args:
        segments: of the sample, in order.
        mask_L: where the model wrote.
    """
    rewards_L = np.zeros(len(mask_L), np.float64)
    written = np.flatnonzero(mask_L)
    if len(written):
        for segment in segments:
            if segment.reward:
                place = max(0, int(np.searchsorted(written, segment.end)) - 1)
                rewards_L[written[place]] += segment.reward
    return rewards_L
