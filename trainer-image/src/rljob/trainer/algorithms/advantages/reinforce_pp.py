"""Advantages that are whitened over all tokens of the batch.

Shapes: L tokens of a sample, G members of a group.
"""

from __future__ import annotations

import numpy as np

from rljob.trainer.algorithms.advantages.base import AdvantageInputs, Floats
from rljob.trainer.algorithms.advantages.group import group_centered
from rljob.trainer.algorithms.stabilizers import whiten


def reinforce_pp(inputs: AdvantageInputs) -> dict[int, Floats]:
    """Return the return of each token, whitened over the batch (REINFORCE++, arXiv 2501.03262).

    The return is r + γ·return of the model's next token. Observations between turns are skipped: the rewards of later
    turns reach earlier turns.
    """
    assert inputs.algorithm.discount is not None, "resolved"
    returns = {}
    for i, rewards_L in inputs.rewards.items():
        total, returns[i] = 0.0, np.zeros(len(rewards_L))
        for t in reversed(np.flatnonzero(inputs.rows[i].mask_L)):
            total = returns[i][t] = rewards_L[t] + inputs.algorithm.discount * total
    return _whitened(returns, inputs)


def reinforce_pp_baseline(inputs: AdvantageInputs) -> dict[int, Floats]:
    """Return R − mean of the group for each token, whitened over the batch (REINFORCE++ baseline, arXiv 2501.03262)."""
    return _whitened(group_centered(inputs), inputs)


def _whitened(values: dict[int, Floats], inputs: AdvantageInputs) -> dict[int, Floats]:
    return whiten(values, {i: row.mask_L for i, row in inputs.rows.items()}, inputs.world)
