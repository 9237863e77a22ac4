"""Importance weights ρ of the trainer's policy before the batch against the engine's, bounded."""

from __future__ import annotations

from torch import Tensor

from rljob.trainer.algorithms.corrections.base import CorrectionInputs


def no_correction(inputs: CorrectionInputs) -> Tensor:
    """Return 1."""
    return inputs.log_rho_BK.new_ones(inputs.mask_BK.shape)


def tis(inputs: CorrectionInputs) -> Tensor:
    """Return min(ρ, correctionCap): truncated importance sampling."""
    assert inputs.algorithm.correction_cap is not None
    return inputs.rho_BK.clamp(max=inputs.algorithm.correction_cap)


def icepop(inputs: CorrectionInputs) -> Tensor:
    """Return ρ within [correctionFloor, correctionCap], else 0 (IcePop, arXiv 2510.18855)."""
    low, high = inputs.algorithm.correction_floor, inputs.algorithm.correction_cap
    assert low is not None and high is not None
    rho_BK = inputs.rho_BK
    return rho_BK.where((rho_BK >= low) & (rho_BK <= high), 0.0)
