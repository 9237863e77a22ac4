"""Sums over the tokens of rows and of turns.

Shapes: B rows, each a sequence of a sample (all of it, unless it has branches), K positions of a row.
"""

from __future__ import annotations

from torch import Tensor


def sample_sums(values_BK: Tensor, mask_BK: Tensor) -> Tensor:
    """Return at each position the sum over the row where the mask is set."""
    return values_BK.where(mask_BK, 0).sum(-1, keepdim=True).expand_as(values_BK)


def sample_means(values_BK: Tensor, mask_BK: Tensor) -> Tensor:
    """Return at each position the mean over the row where the mask is set; 0 if it is set nowhere."""
    return sample_sums(values_BK, mask_BK) / sample_sums(values_BK.new_ones(mask_BK.shape), mask_BK).clamp(min=1)


def turn_sums(values_BK: Tensor, mask_BK: Tensor, turns_BK: Tensor, turns: int) -> Tensor:
    """Return at each position the sum over its turn where the mask is set.

    Args:
        values_BK: of each token.
        mask_BK: True at the model's tokens.
        turns_BK: number of the turn of each token, below ``turns``.
        turns: largest number of turns of a row.
    """
    sums_BS = values_BK.new_zeros(len(values_BK), turns)
    return sums_BS.scatter_add(1, turns_BK, values_BK.where(mask_BK, 0)).gather(1, turns_BK)


def turn_means(values_BK: Tensor, mask_BK: Tensor, turns_BK: Tensor, turns: int) -> Tensor:
    """Return at each position the mean over its turn where the mask is set; 0 if it is set nowhere."""
    counts_BK = turn_sums(values_BK.new_ones(mask_BK.shape), mask_BK, turns_BK, turns)
    return turn_sums(values_BK, mask_BK, turns_BK, turns) / counts_BK.clamp(min=1)
