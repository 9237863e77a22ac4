"""The ratio without a clip, with a penalty at the tokens of highest covariance of advantage and log-probability."""

from __future__ import annotations

import numpy as np
import torch

from rljob.trainer.algorithms.objectives.base import Objective, ObjectiveInputs
from rljob.trainer.algorithms.token_selection import Bools, SelectionInputs, covariances, first_tokens, selects


def highest(inputs: SelectionInputs) -> Bools:
    """Select the covarianceShare of the batch's tokens with the highest covariances."""
    assert inputs.algorithm.covariance_share is not None
    covariances_T = covariances(inputs)
    everywhere_T = np.ones(len(covariances_T), np.bool_)
    return first_tokens(inputs, covariances_T, everywhere_T, inputs.number(inputs.algorithm.covariance_share))


@selects(highest)
def kl_cov(inputs: ObjectiveInputs) -> Objective:
    """Return r·A, and r·A − β·|log r| with β = covariancePenalty at selected tokens (KL-Cov, arXiv 2505.22617).

    The penalty has a gradient where the advantage is 0 too, and none where r is 1.
    """
    penalty, log_ratio_BK = inputs.algorithm.covariance_penalty, inputs.log_ratio_BK
    assert penalty is not None
    ratio_BK = log_ratio_BK.exp()
    values_BK = ratio_BK * inputs.advantages_BK - penalty * log_ratio_BK.abs().where(inputs.selected_BK, 0.0)
    return Objective(values_BK, ratio_BK.detach(), torch.zeros_like(inputs.mask_BK))
