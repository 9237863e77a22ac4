"""A smooth kernel of the ratio of a whole sample instead of a clip."""

from __future__ import annotations

import torch
from torch import Tensor

from rljob.trainer.algorithms.objectives.base import (
    MAX_LOG_RATIO,
    Objective,
    ObjectiveInputs,
    zero_without_advantage,
)
from rljob.trainer.algorithms.token_sums import sample_sums


@zero_without_advantage
def vespo(inputs: ObjectiveInputs) -> Objective:
    """Return sg[φ(w)]·A·l with φ(w) = w^k·exp(λ·(1 − w)) and w the ratio of the sample (VESPO, arXiv 2602.10693).

    k and λ are kernelPower and kernelDecay of the sign of the token's advantage. w is the product over the tokens of
    the sample, its logarithm clamped to ±20. φ(1) = 1; φ is largest at w = k/λ, so no token is counted as clipped.
    """
    log_ratio_BK = inputs.logprobs_BK.detach() - inputs.denominator_BK.detach()
    log_w_BK = sample_sums(log_ratio_BK, inputs.mask_BK).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    settings = inputs.algorithm
    positive_BK = _kernel(log_w_BK, settings.kernel_power_positive, settings.kernel_decay_positive)
    negative_BK = _kernel(log_w_BK, settings.kernel_power_negative, settings.kernel_decay_negative)
    weights_BK = torch.where(inputs.advantages_BK > 0, positive_BK, negative_BK)
    values_BK = weights_BK * inputs.advantages_BK * inputs.logprobs_BK
    return Objective(values_BK, log_w_BK.exp(), torch.zeros_like(inputs.mask_BK))


def _kernel(log_w_BK: Tensor, power: float | None, decay: float | None) -> Tensor:
    """Return φ(w); finite in float32 for the powers and decays that a manifest may have."""
    assert power is not None and decay is not None
    return (power * log_w_BK + decay * (1 - log_w_BK.exp())).exp()
