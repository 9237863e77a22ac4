"""Rewards of the tokens of a sample.

Shapes: L tokens of a sample, prompt included.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from rljob.protocol.batch_samples import Segment


def token_rewards(segments: Iterable[Segment], mask_L: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the reward of each token (L,); their sum is the sample's reward.

    The reward of a segment is assigned to the last token of the model up to the segment's end. The reward of a turn
    without tokens is assigned to the previous turn, or to the model's first token if there is none. In a sample without
    tokens of the model all rewards are 0.

    Args:
        segments: of the sample, in order.
        mask_L: True at the model's tokens.
    """
    rewards_L = np.zeros(len(mask_L), np.float64)
    written = np.flatnonzero(mask_L)
    if len(written):
        for segment in segments:
            if segment.reward:
                place = max(0, int(np.searchsorted(written, segment.end)) - 1)
                rewards_L[written[place]] += segment.reward
    return rewards_L
