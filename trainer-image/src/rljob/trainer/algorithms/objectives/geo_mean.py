"""The geometric mean of the clipped ratios of a sample."""

from __future__ import annotations

import torch

from rljob.trainer.algorithms.objectives.base import Objective, ObjectiveInputs, zero_without_advantage
from rljob.trainer.algorithms.token_sums import sample_means


@zero_without_advantage
def geo_mean(inputs: ObjectiveInputs) -> Objective:
    """Return sg[s]·exp(c − sg[c])·A with s = exp(mean of c over the sample) (GMPO, arXiv 2507.20673, by token).

    c is the log-ratio, clipped to [−clipLow, clipHigh] where that lowers c·A: above for A > 0, below for A < 0. With
    `seq_mean_token_mean` value and gradient are those of A·s for each sample.
    """
    settings, advantages_BK = inputs.algorithm, inputs.advantages_BK
    assert settings.clip_low is not None and settings.clip_high is not None
    log_ratio_BK = inputs.log_ratio_BK
    clipped_BK = torch.where(
        advantages_BK > 0, log_ratio_BK.clamp(max=settings.clip_high), log_ratio_BK.clamp(min=-settings.clip_low)
    )
    fixed_BK = clipped_BK.detach()
    ratio_BK = sample_means(fixed_BK, inputs.mask_BK).exp()
    values_BK = ratio_BK * (clipped_BK - fixed_BK).exp() * advantages_BK
    return Objective(values_BK, ratio_BK, fixed_BK != log_ratio_BK.detach())
