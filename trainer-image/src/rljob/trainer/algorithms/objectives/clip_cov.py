"""The clipped ratio of PPO without some tokens whose covariance of advantage and log-probability is high."""

from __future__ import annotations

import numpy as np

from rljob.trainer.algorithms.objectives.base import Objective, ObjectiveInputs
from rljob.trainer.algorithms.objectives.ppo_clip import clipped
from rljob.trainer.algorithms.token_selection import Bools, SelectionInputs, covariances, first_tokens, selects


def draw(inputs: SelectionInputs) -> Bools:
    """Draw a covarianceShare of the batch's tokens among those whose covariance is in (covarianceLow, covarianceHigh).

    Tokens that the ratio clips already are not drawn. If there are fewer, all are.
    """
    settings, covariances_T = inputs.algorithm, covariances(inputs)
    assert settings.clip_low is not None and settings.clip_high is not None and settings.covariance_share is not None
    assert settings.covariance_low is not None and settings.covariance_high is not None
    ratio_T, advantages_T = np.exp(inputs.log_ratio_T), inputs.advantages_T
    above_T = (advantages_T > 0) & (ratio_T > 1 + settings.clip_high)
    below_T = (advantages_T < 0) & (ratio_T < 1 - settings.clip_low)
    inside_T = (covariances_T > settings.covariance_low) & (covariances_T < settings.covariance_high)
    allowed_T = inside_T & ~above_T & ~below_T
    return first_tokens(inputs, np.zeros(len(allowed_T)), allowed_T, inputs.number(settings.covariance_share))


@selects(draw)
def clip_cov(inputs: ObjectiveInputs) -> Objective:
    """Return min(r·A, clip(r, 1 − clipLow, 1 + clipHigh)·A), and 0 at drawn tokens (Clip-Cov, arXiv 2505.22617).

    Drawn tokens count as clipped. All samples are needed: their tokens are a part of the means.
    """
    plain = clipped(inputs.log_ratio_BK.exp(), inputs.advantages_BK, inputs)
    values_BK = plain.values_BK.masked_fill(inputs.selected_BK, 0.0)
    return Objective(values_BK, plain.ratio_BK, plain.clipped_BK | inputs.selected_BK)
