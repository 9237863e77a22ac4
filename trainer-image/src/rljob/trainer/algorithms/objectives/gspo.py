"""The clipped ratio of a whole sample, or of a turn: the geometric mean of the ratios of its tokens.

The value of s·exp(l − sg[l]) is s at every token; its gradient is s times that of the token's log-probability.
"""

from __future__ import annotations

from torch import Tensor

from rljob.trainer.algorithms.objectives.base import (
    MAX_LOG_RATIO,
    Objective,
    ObjectiveInputs,
    zero_without_advantage,
)
from rljob.trainer.algorithms.objectives.ppo_clip import clipped
from rljob.trainer.algorithms.token_sums import sample_means, turn_means


@zero_without_advantage
def gspo(inputs: ObjectiveInputs) -> Objective:
    """Return the clipped objective with s = exp(mean over the sample of l − denominator) (GSPO-token, 2507.18071)."""
    log_ratio_BK = inputs.logprobs_BK.detach() - inputs.denominator_BK.detach()
    return _clipped_mean(sample_means(log_ratio_BK, inputs.mask_BK), inputs)


@zero_without_advantage
def segment_clip(inputs: ObjectiveInputs) -> Objective:
    """Return the objective of :func:`gspo` with the mean over the token's turn instead of its sample."""
    log_ratio_BK = inputs.logprobs_BK.detach() - inputs.denominator_BK.detach()
    return _clipped_mean(turn_means(log_ratio_BK, inputs.mask_BK, inputs.turns_BK, inputs.turns), inputs)


def _clipped_mean(mean_BK: Tensor, inputs: ObjectiveInputs) -> Objective:
    """``mean_BK``: without gradient."""
    attached_BK = (inputs.logprobs_BK - inputs.logprobs_BK.detach()).exp()
    ratio_BK = mean_BK.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() * attached_BK
    return clipped(ratio_BK, inputs.advantages_BK, inputs)
