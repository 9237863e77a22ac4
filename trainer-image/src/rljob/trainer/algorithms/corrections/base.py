"""Interface of corrections: weights of tokens for the mismatch between engine and trainer.

``spec.algorithm.correction`` names a built-in function or ``module:function`` of a user's package. It is called once
per microbatch, without gradient, with :class:`CorrectionInputs`, and returns a weight for each token, (B, K), of at
least 0, by which the token's objective is multiplied. A token of weight 0 has no gradient of the objective; it still
counts in the denominators of the aggregation. :func:`correction_weights` multiplies the weights by the masks of
``spec.algorithm``.

Shapes: B rows of a microbatch, each a sequence of a sample (all of it, unless it has branches), K positions of a row
that may hold the model's tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from rljob.api.algorithm import Algorithm
from rljob.trainer.algorithms.returned_values import kind_of
from rljob.trainer.algorithms.token_sums import sample_means, sample_sums, turn_sums

MAX_LOG_WEIGHT = 20.0


@dataclass(frozen=True)
class CorrectionInputs:
    """Arguments of a correction: one microbatch. Log-probabilities outside ``mask_BK`` are 0."""

    old_BK: Tensor  # of the trainer before the batch's first update
    behavior_BK: Tensor  # of the engine when the token was sampled
    current_BK: Tensor  # of the policy in training
    advantages_BK: Tensor
    mask_BK: Tensor  # True at the model's tokens
    turns_BK: Tensor  # number of the turn of each token, from 0
    turns: int  # largest number of turns of a row
    algorithm: Algorithm  # resolved

    @property
    def log_rho_BK(self) -> Tensor:
        """log ρ of each token: log-probability of the trainer before the batch minus that of the engine."""
        return self.old_BK - self.behavior_BK

    @property
    def rho_BK(self) -> Tensor:
        """ρ at the level of ``correctionLevel``, its logarithm clamped to ±20."""
        log_rho_BK, level = self.log_rho_BK, self.algorithm.correction_level
        if level == "segment":
            log_rho_BK = turn_sums(log_rho_BK, self.mask_BK, self.turns_BK, self.turns)
        elif level == "sequence":
            log_rho_BK = sample_sums(log_rho_BK, self.mask_BK)
        elif level == "geometric":
            log_rho_BK = sample_means(log_rho_BK, self.mask_BK)
        return log_rho_BK.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()


Correction: TypeAlias = Callable[[CorrectionInputs], Tensor]
"""(inputs) → weight of each token (B, K)."""


@torch.no_grad()
def correction_weights(correction: Correction, inputs: CorrectionInputs) -> Tensor:
    """Return the weight of each token (B, K); 0 where a mask of ``spec.algorithm`` applies or no token is.

    Raises:
        ValueError: the correction returned no tensor, or one of another shape.
    """
    weights_BK: object = correction(inputs)
    if not isinstance(weights_BK, Tensor):
        raise ValueError(f"it returned {kind_of(weights_BK)}; it must return a tensor of weights of shape (B, K)")
    if weights_BK.shape != inputs.mask_BK.shape:
        raise ValueError(f"it returned weights of shape {tuple(weights_BK.shape)} for {tuple(inputs.mask_BK.shape)}")
    return weights_BK.where(inputs.mask_BK & _kept(inputs), 0.0)


def _kept(inputs: CorrectionInputs) -> Tensor:
    """Return whether no mask applies to each token."""
    settings, mask_BK = inputs.algorithm, inputs.mask_BK
    kept_BK = torch.ones_like(mask_BK)
    mean_BK = sample_means(inputs.log_rho_BK, mask_BK).exp()
    if settings.mask_geometric_below is not None:
        kept_BK &= mean_BK >= settings.mask_geometric_below
    if settings.mask_geometric_above is not None:
        kept_BK &= mean_BK <= settings.mask_geometric_above
    if settings.veto_below is not None:
        vetoed_BK = (inputs.log_rho_BK.exp() < settings.veto_below) & mask_BK
        kept_BK &= ~vetoed_BK.any(-1, keepdim=True)
    if settings.mask_probability_gap is not None:
        kept_BK &= (inputs.old_BK.exp() - inputs.behavior_BK.exp()).abs() <= settings.mask_probability_gap
    if settings.mask_negative_kl is not None:
        kl_BK = sample_means(inputs.behavior_BK - inputs.current_BK, mask_BK)
        kept_BK &= (inputs.advantages_BK >= 0) | (kl_BK <= settings.mask_negative_kl)
    return kept_BK
