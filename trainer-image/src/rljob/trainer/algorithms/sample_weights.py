"""Weights of samples in the loss, by which the weights of the aggregation are multiplied: by length, difficulty and
whether an answer was cut. Denominators are those of the aggregation.

Shapes: N samples of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rljob.api.algorithm import Algorithm
from rljob.protocol.batch_samples import BatchSample
from rljob.trainer.algorithms.advantages.base import Floats, group_numbers, lengths_of, rewards_of


def sample_weights(samples: Sequence[BatchSample], algorithm: Algorithm) -> Floats:
    """Return the weight of each sample (N,); 1 without a field that sets it, and for a sample without tokens.

    Args:
        samples: of the whole batch, with the rewards that the algorithm uses.
        algorithm: resolved.
    """
    weights_N = np.ones(len(samples))
    if algorithm.truncated_weight is not None:
        weights_N[[sample.truncated for sample in samples]] *= algorithm.truncated_weight
    if algorithm.length_exponent is not None:
        weights_N *= _by_length(samples, algorithm.length_exponent)
    if algorithm.difficulty_exponent is not None:
        weights_N *= _by_difficulty(samples, algorithm.difficulty_exponent)
    return weights_N


def _by_length(samples: Sequence[BatchSample], exponent: float) -> Floats:
    lengths_N = lengths_of(samples).astype(np.float64)
    written_N = lengths_N > 0
    relative_N = np.ones(len(samples))
    if written_N.any():
        relative_N[written_N] = lengths_N[written_N] / lengths_N.mean()
    return relative_N**exponent


def _by_difficulty(samples: Sequence[BatchSample], exponent: float) -> Floats:
    """Return (1 − mean reward of the group)^exponent over its mean; 1 if all groups are solved."""
    if not samples:
        return np.ones(0)
    groups_N = group_numbers(samples)
    means_N = (np.bincount(groups_N, rewards_of(samples)) / np.bincount(groups_N))[groups_N]
    hard_N = (1 - means_N.clip(0, 1)) ** exponent
    return hard_N / hard_N.mean() if hard_N.any() else np.ones(len(samples))
