"""Advantages that cannot be used."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rljob.trainer.algorithms.advantages.base import per_group


@per_group
def too_few(rewards_G: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the advantages of all members but one."""
    return rewards_G[1:]
