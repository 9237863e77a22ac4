"""REINFORCE with a truncated importance weight: w·A·l, where the weight w carries no gradient.

No token is dropped: a truncated weight only bounds the token's gradient. With one update per batch the weight differs
from 1 only against the behaviour policy (`ratio: behavior`).
"""

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
def cispo(inputs: ObjectiveInputs) -> Objective:
    """Return clip(r, 1 − clipLow, 1 + clipHigh)·A·l (CISPO, arXiv 2506.13585)."""
    settings = inputs.algorithm
    assert settings.clip_low is not None and settings.clip_high is not None
    ratio_BK = inputs.log_ratio_BK.detach().exp()
    return _weighted(ratio_BK, ratio_BK.clamp(1 - settings.clip_low, 1 + settings.clip_high), inputs)


@zero_without_advantage
def tis(inputs: ObjectiveInputs) -> Objective:
    """Return min(r, 1)·A·l (truncated importance sampling, arXiv 2503.14286, by token)."""
    ratio_BK = inputs.log_ratio_BK.detach().exp()
    return _weighted(ratio_BK, ratio_BK.clamp(max=1.0), inputs)


@zero_without_advantage
def topr(inputs: ObjectiveInputs) -> Objective:
    """Return A·l for samples with a positive reward, else min(ratio of the sample, 1)·A·l (TOPR, arXiv 2503.14286).

    The ratio of a sample is the product over its tokens; its logarithm is clamped to ±20.
    """
    log_ratio_BK = inputs.logprobs_BK.detach() - inputs.denominator_BK.detach()
    ratio_BK = sample_sums(log_ratio_BK, inputs.mask_BK).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    positive_BK = (inputs.rewards_B > 0).unsqueeze(-1).expand_as(ratio_BK)
    return _weighted(ratio_BK, torch.where(positive_BK, torch.ones_like(ratio_BK), ratio_BK.clamp(max=1.0)), inputs)


def _weighted(ratio_BK: Tensor, weights_BK: Tensor, inputs: ObjectiveInputs) -> Objective:
    """``ratio_BK``, ``weights_BK``: without gradient."""
    values_BK = weights_BK * inputs.advantages_BK * inputs.logprobs_BK
    return Objective(values_BK, ratio_BK, weights_BK != ratio_BK)
