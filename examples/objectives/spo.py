"""An example of a user's objective: Simple Policy Optimization (arXiv 2401.16025).

A manifest names it with `objective: examples.objectives.spo:spo`; ε is `clipHigh`.
"""

import torch

from rljob.trainer.algorithms.objectives.base import Objective, ObjectiveInputs, zero_without_advantage


@zero_without_advantage
def spo(inputs: ObjectiveInputs) -> Objective:
    """Return r·A − |A|/(2ε)·(r − 1)²: its slope is 0 at r = 1 + ε for A > 0 and at r = 1 − ε for A < 0."""
    ratio_BK, advantages_BK = inputs.log_ratio_BK.exp(), inputs.advantages_BK
    epsilon = inputs.algorithm.clip_high
    penalty_BK = advantages_BK.abs() / (2 * epsilon) * (ratio_BK - 1).square()
    values_BK = ratio_BK * advantages_BK - penalty_BK
    return Objective(values_BK, ratio_BK.detach(), torch.zeros_like(inputs.mask_BK))
