"""The clipped probability ratio of PPO.

The ratio's denominator carries no gradient. Ratio and objective use the clamped log-ratio.
"""

from __future__ import annotations

import torch

from rljob.trainer.algorithms.objectives.base import (
    MAX_LOG_RATIO,
    Objective,
    ObjectiveInputs,
    zero_without_advantage,
)


@zero_without_advantage
def ppo_clip(inputs: ObjectiveInputs) -> Objective:
    """Return the objective of each token (PPO, arXiv 1707.06347).

    min(r·A, clip(r, 1 − clipLow, 1 + clipHigh)·A) with r = exp(logprob − denominator), the log-ratio clamped to ±20;
    for A < 0 and a dual clip c it is at least c·A (arXiv 1912.09729).
    """
    settings, advantages_BK = inputs.algorithm, inputs.advantages_BK
    assert settings.clip_low is not None and settings.clip_high is not None
    log_ratio_BK = (inputs.logprobs_BK - inputs.denominator_BK.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_BK = log_ratio_BK.exp()
    plain_BK = ratio_BK * advantages_BK
    objective_BK = torch.minimum(
        plain_BK, ratio_BK.clamp(1 - settings.clip_low, 1 + settings.clip_high) * advantages_BK
    )
    if settings.dual_clip is not None:
        bounded_BK = torch.maximum(objective_BK, settings.dual_clip * advantages_BK)
        objective_BK = torch.where(advantages_BK < 0, bounded_BK, objective_BK)
    return Objective(objective_BK, ratio_BK.detach(), (objective_BK != plain_BK).detach())
