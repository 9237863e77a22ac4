"""REINFORCE with a penalty on the squared log-ratio."""

from __future__ import annotations

import torch

from rljob.trainer.algorithms.objectives.base import Objective, ObjectiveInputs


def kimi(inputs: ObjectiveInputs) -> Objective:
    """Return A·l − τ/2·(l − denominator)² with τ = logRatioPenalty (Kimi k1.5, arXiv 2501.12599, by token).

    The penalty has a gradient where the advantage is 0 too, so all samples are trained.
    """
    tau, log_ratio_BK = inputs.algorithm.log_ratio_penalty, inputs.log_ratio_BK
    assert tau is not None
    values_BK = inputs.advantages_BK * inputs.logprobs_BK - tau / 2 * log_ratio_BK.square()
    return Objective(values_BK, log_ratio_BK.detach().exp(), torch.zeros_like(inputs.mask_BK))
