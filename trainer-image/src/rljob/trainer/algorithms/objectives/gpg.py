"""REINFORCE without a ratio."""

from __future__ import annotations

import torch

from rljob.trainer.algorithms.objectives.base import Objective, ObjectiveInputs, zero_without_advantage


@zero_without_advantage
def gpg(inputs: ObjectiveInputs) -> Objective:
    """Return A·l (GPG, arXiv 2504.02546). The ratio is that of the metrics only."""
    values_BK = inputs.advantages_BK * inputs.logprobs_BK
    return Objective(values_BK, inputs.log_ratio_BK.detach().exp(), torch.zeros_like(inputs.mask_BK))
