"""Return of each turn of an agent.

Shapes: L tokens of a sample, S turns of a sample.
"""

from __future__ import annotations

import numpy as np

from rljob.trainer.algorithms.advantages.base import AdvantageInputs, Floats


def turn_return(inputs: AdvantageInputs) -> dict[int, Floats]:
    """Return for each token the return of its turn: reward of the turn + γ·return of the next turn (ROLL, turn level).

    All tokens of a turn have one value. There is no baseline: `whitenAdvantages` subtracts the mean of the batch.
    """
    assert inputs.algorithm.discount is not None, "resolved"
    advantages = {}
    for i, rewards_L in inputs.rewards.items():
        turns_L = inputs.rows[i].turns_L
        returns_S: Floats = np.bincount(turns_L, rewards_L, len(inputs.rows[i].turn_ends) + 1).astype(np.float64)
        for turn in range(len(returns_S) - 2, -1, -1):
            returns_S[turn] += inputs.algorithm.discount * returns_S[turn + 1]
        advantages[i] = returns_S[turns_L]
    return advantages
