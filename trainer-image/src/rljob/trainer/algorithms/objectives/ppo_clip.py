"""The clipped probability ratio of PPO, and the same on positive samples only.

The ratio's denominator carries no gradient. Ratio and objective use the clamped log-ratio.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rljob.trainer.algorithms.objectives.base import Objective, ObjectiveInputs, zero_without_advantage


@zero_without_advantage
def ppo_clip(inputs: ObjectiveInputs) -> Objective:
    """Return the objective of each token (PPO, arXiv 1707.06347).

    min(r·A, clip(r, 1 − clipLow, 1 + clipHigh)·A) with r = exp(logprob − denominator), the log-ratio clamped to ±20;
    for A < 0 and a dual clip c it is at least c·A (arXiv 1912.09729).
    """
    return clipped(inputs.log_ratio_BK.exp(), inputs.advantages_BK, inputs)


@zero_without_advantage
def raft_pp(inputs: ObjectiveInputs) -> Objective:
    """Return ``ppo_clip`` at the tokens of samples whose reward is positive, else 0 (RAFT++, arXiv 2504.11343)."""
    positive_B1 = (inputs.rewards_B > 0).unsqueeze(-1)
    return clipped(inputs.log_ratio_BK.exp(), inputs.advantages_BK.where(positive_B1, 0.0), inputs)


def clipped(ratio_BK: Tensor, advantages_BK: Tensor, inputs: ObjectiveInputs) -> Objective:
    """Return the clipped objective of PPO for any ratio."""
    settings = inputs.algorithm
    assert settings.clip_low is not None and settings.clip_high is not None
    plain_BK = ratio_BK * advantages_BK
    objective_BK = torch.minimum(
        plain_BK, ratio_BK.clamp(1 - settings.clip_low, 1 + settings.clip_high) * advantages_BK
    )
    if settings.dual_clip:
        bounded_BK = torch.maximum(objective_BK, settings.dual_clip * advantages_BK)
        objective_BK = torch.where(advantages_BK < 0, bounded_BK, objective_BK)
    return Objective(objective_BK, ratio_BK.detach(), (objective_BK != plain_BK).detach())
