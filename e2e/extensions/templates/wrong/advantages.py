"""Advantages that cannot be used."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rljob.trainer.algorithms.advantages.base import AdvantageInputs, per_batch, per_group


@per_group
def too_few(rewards_G: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the advantages of all members but one."""
    return rewards_G[1:]


@per_batch
def not_a_number(inputs: AdvantageInputs) -> NDArray[np.float64]:
    """Return no numbers."""
    return np.full_like(inputs.rewards_N, np.nan)
