"""A soft gate instead of a clip."""

from __future__ import annotations

import torch

from rljob.trainer.algorithms.objectives.base import Objective, ObjectiveInputs, zero_without_advantage


@zero_without_advantage
def sapo(inputs: ObjectiveInputs) -> Objective:
    """Return σ(τ·(r − 1))·4/τ·A with τ = gatePositive for A > 0, else gateNegative (SAPO, arXiv 2511.20347).

    At r = 1 the gradient is that of r·A. No token is counted as clipped.
    """
    settings, advantages_BK = inputs.algorithm, inputs.advantages_BK
    assert settings.gate_positive is not None and settings.gate_negative is not None
    ratio_BK = inputs.log_ratio_BK.exp()
    tau_BK = torch.full_like(ratio_BK, settings.gate_negative).masked_fill(advantages_BK > 0, settings.gate_positive)
    values_BK = (tau_BK * (ratio_BK - 1)).sigmoid() * (4 / tau_BK) * advantages_BK
    return Objective(values_BK, ratio_BK.detach(), torch.zeros_like(inputs.mask_BK))
