"""Normalisation of rewards: a mean that is subtracted and a deviation that divides, of a group, a batch or all batches.

Shapes: N samples of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from rljob.api.algorithm import Algorithm
from rljob.protocol.batch_samples import BatchSample
from rljob.protocol.trainer_protocol import EarlierSteps, Train
from rljob.trainer.algorithms.advantages.base import Floats, group_numbers, rewards_of

DEVIATION_OF_EQUAL = 1e-12
"""A smaller deviation of rewards is rounding, also relative to their mean: the rewards are equal."""
NO_EARLIER = EarlierSteps()


def normalize_rewards(train: Train, algorithm: Algorithm) -> Train:
    """Return the batch's scalars with `rewardMean` subtracted from rewards and baselines, divided by `rewardStd`."""
    if algorithm.reward_mean is None and algorithm.reward_std is None:
        return train
    rewards_N = rewards_of(train.samples)
    shift_N, scale_N = np.zeros_like(rewards_N), np.ones_like(rewards_N)
    if algorithm.reward_mean is not None:
        shift_N += _MOMENTS[algorithm.reward_mean](train, rewards_N)[0]
    if algorithm.reward_std is not None:
        scale_N *= _MOMENTS[algorithm.reward_std](train, rewards_N)[1]
    samples = [
        _normalized(sample, float(shift), float(scale))
        for sample, shift, scale in zip(train.samples, shift_N, scale_N, strict=True)
    ]
    return msgspec.structs.replace(train, samples=samples)


def _normalized(sample: BatchSample, shift: float, scale: float) -> BatchSample:
    baseline = None if sample.baseline is None else (sample.baseline - shift) / scale
    return msgspec.structs.replace(sample, reward=(sample.reward - shift) / scale, baseline=baseline)


def moments(earlier: EarlierSteps, rewards_N: Floats) -> tuple[float, float]:
    """Return the mean and the unbiased standard deviation of earlier rewards and those of a batch; a deviation of 0, or
    of one reward, is 1."""
    if not len(rewards_N):
        return earlier.reward_mean, 1.0
    own = float(rewards_N.mean())
    all_of = earlier.with_rewards(len(rewards_N), own, float(np.square(rewards_N - own).sum()))
    deviation = math.sqrt(all_of.reward_squares / (all_of.samples - 1)) if all_of.samples > 1 else 0.0
    rounding = DEVIATION_OF_EQUAL * max(1.0, abs(all_of.reward_mean))
    return all_of.reward_mean, deviation if deviation > rounding else 1.0


def _of_groups(train: Train, rewards_N: Floats) -> tuple[Floats, Floats]:
    groups_N: NDArray[np.int64] = group_numbers(train.samples)
    means_N, deviations_N = np.empty_like(rewards_N), np.empty_like(rewards_N)
    for group in np.unique(groups_N):
        members = groups_N == group
        means_N[members], deviations_N[members] = moments(NO_EARLIER, rewards_N[members])
    return means_N, deviations_N


def _of_batch(train: Train, rewards_N: Floats) -> tuple[float, float]:
    return moments(NO_EARLIER, rewards_N)


def _so_far(train: Train, rewards_N: Floats) -> tuple[float, float]:
    return moments(train.earlier, rewards_N)


_MOMENTS: dict[str, Callable[[Train, Floats], tuple[Floats | float, Floats | float]]] = {
    "group": _of_groups,
    "batch": _of_batch,
    "running": _so_far,
}
"""Value of `rewardMean` and `rewardStd` → mean and deviation, of each sample or of all."""
