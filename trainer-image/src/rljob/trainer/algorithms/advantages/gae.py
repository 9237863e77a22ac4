"""Generalized advantage estimation: advantages and returns of tokens from rewards and the values of a critic.

Shapes: L tokens of a sample, prompt included.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rljob.api.algorithm import Algorithm
from rljob.trainer.algorithms.advantages.base import AdvantageInputs, Floats
from rljob.trainer.algorithms.needs import requires


@requires(values=True)
def gae(inputs: AdvantageInputs) -> dict[int, Floats]:
    """Return Σ (γλ)^k δ of the model's following tokens, with δ = r + γ·V(next token) − V (GAE, arXiv 1506.02438).

    λ is `gaeLambda`, or 1 − 1/(α·L) with `gaeLengthFactor` α in a sample of L tokens (VAPO, arXiv 2504.05118).
    """
    algorithm, values = inputs.algorithm, inputs.scores.values_by_row()
    assert algorithm.discount is not None, "resolved"
    return {
        i: discounted_errors(
            inputs.rewards[i], values[i], row.mask_L, algorithm.discount, lambda_of(algorithm, int(row.mask_L.sum()))
        )
        for i, row in inputs.rows.items()
    }


def lambda_of(algorithm: Algorithm, tokens: int) -> float:
    """Return λ of a sample with this number of the model's tokens."""
    if algorithm.gae_length_factor is not None:
        return max(0.0, 1.0 - 1.0 / (algorithm.gae_length_factor * max(1, tokens)))
    assert algorithm.gae_lambda is not None, "resolved"
    return algorithm.gae_lambda


def discounted_errors(
    rewards_L: Floats, values_L: NDArray[np.floating], mask_L: NDArray[np.bool_], discount: float, trace: float
) -> Floats:
    """Return the advantage of each of the model's tokens (L,); 0 elsewhere.

    The next token of the last token of a turn is the first token of the next turn: observations are skipped, and the
    rewards of later turns reach earlier turns. The value after the last token is 0.

    Args:
        rewards_L: reward that arrives at each token.
        values_L: value before each of the model's tokens.
        mask_L: True at the model's tokens.
        discount: γ.
        trace: λ.
    """
    advantages_L = np.zeros(len(mask_L))
    value_after, advantage_after = 0.0, 0.0
    for t in reversed(np.flatnonzero(mask_L)):
        value = float(values_L[t])
        advantage_after = rewards_L[t] + discount * value_after - value + discount * trace * advantage_after
        advantages_L[t], value_after = advantage_after, value
    return advantages_L
