"""Changes of rewards before, and of advantages after, the function of ``spec.algorithm.advantage``.

Shapes: N samples of the batch, L tokens of a sample, T the model's tokens of this replica's rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from rljob.api.algorithm import Algorithm
from rljob.protocol.batch_samples import BatchSample
from rljob.protocol.trainer_protocol import Train
from rljob.trainer.algorithms.advantages.base import Floats, group_numbers, rewards_of
from rljob.trainer.algorithms.reward_normalization import normalize_rewards
from rljob.trainer.process_group import World

WHITENING_EPSILON = 1e-8


def shape_rewards(train: Train, algorithm: Algorithm) -> Train:
    """Return the batch's scalars with normalised, then clipped rewards, minus the punishment of long answers."""
    train = normalize_rewards(train, algorithm)
    if algorithm.reward_clip is None and algorithm.overlong_buffer is None:
        return train
    samples = [
        msgspec.structs.replace(
            sample, reward=_shaped(sample, algorithm), baseline=_clipped(sample.baseline, algorithm)
        )
        for sample in train.samples
    ]
    return msgspec.structs.replace(train, samples=samples)


def _shaped(sample: BatchSample, algorithm: Algorithm) -> float:
    reward = _clipped(sample.reward, algorithm)
    assert reward is not None
    if algorithm.overlong_buffer is not None:
        assert algorithm.overlong_penalty is not None, "resolved"
        excess = sample.response_tokens - (sample.max_tokens - algorithm.overlong_buffer)
        reward -= algorithm.overlong_penalty * min(1.0, max(0.0, excess / algorithm.overlong_buffer))
    return reward


def _clipped(reward: float | None, algorithm: Algorithm) -> float | None:
    if reward is None or algorithm.reward_clip is None:
        return reward
    return min(algorithm.reward_clip, max(-algorithm.reward_clip, reward))


def shape_tokens(rewards_L: Floats, mask_L: NDArray[np.bool_], change: float) -> Floats:
    """Return the rewards of a sample's tokens with ``change`` added to the model's last token."""
    written = np.flatnonzero(mask_L)
    if change == 0 or not len(written):
        return rewards_L
    shaped_L = rewards_L.copy()
    shaped_L[written[-1]] += change
    return shaped_L


def masked_groups(samples: Sequence[BatchSample], algorithm: Algorithm) -> NDArray[np.bool_]:
    """Return whether the group of each sample is too easy or too hard (N,): its advantages are 0."""
    low, high = algorithm.difficulty_above, algorithm.difficulty_below
    if (low is None and high is None) or not samples:
        return np.zeros(len(samples), np.bool_)
    groups_N = group_numbers(samples)
    means_N = (np.bincount(groups_N, rewards_of(samples)) / np.bincount(groups_N))[groups_N]
    return (means_N <= (-np.inf if low is None else low)) | (means_N >= (np.inf if high is None else high))


def stabilize(
    advantages: Mapping[int, Floats],
    masks: Mapping[int, NDArray[np.bool_]],
    samples: Sequence[BatchSample],
    algorithm: Algorithm,
    world: World,
    added: Mapping[int, Floats] | None = None,
) -> dict[int, Floats]:
    """Return the advantages (L,) of this replica's rows: whitened, masked by difficulty, with the terms of a teacher
    and clipped, as the fields say.

    All ranks take part.

    Args:
        advantages: of the estimator, by index in the batch.
        masks: True at the model's tokens, by index in the batch.
        samples: of the whole batch.
        algorithm: resolved.
        world: the ranks.
        added: terms of a teacher (L,), by index in the batch.
    """
    stable = whiten(advantages, masks, world) if algorithm.whiten_advantages else dict(advantages)
    hidden_N, bound = masked_groups(samples, algorithm), algorithm.advantage_clip
    for i, advantages_L in stable.items():
        if hidden_N[i]:
            stable[i] = np.zeros_like(advantages_L)
        if added is not None:
            stable[i] = stable[i] + added[i]
        if bound is not None:
            stable[i] = np.clip(stable[i], -bound, bound)
    return stable


def whiten(values: Mapping[int, Floats], masks: Mapping[int, NDArray[np.bool_]], world: World) -> dict[int, Floats]:
    """Return (x − mean) / √(var + 1e-8) over the model's tokens of all replicas, var unbiased.

    All ranks take part, also one without rows, and a sample counts with all its tokens. Of one token the result is 0.

    Args:
        values: of each token (L,), by index in the batch.
        masks: True at the model's tokens, by index in the batch.
        world: the ranks.
    """
    values_T = np.concatenate([np.asarray(values[i], np.float64)[masks[i]] for i in values] or [np.zeros(0)])

    def over_replicas(*sums: float) -> list[float]:
        local = torch.tensor(sums, dtype=torch.float64, device=world.device)
        found: list[float] = world.sum_over_data(local).tolist()
        return found

    count, total = over_replicas(len(values_T), values_T.sum())
    mean = total / max(1.0, count)
    (squares,) = over_replicas(float(np.square(values_T - mean).sum()))
    scale = 1.0 / np.sqrt(squares / max(1.0, count - 1) + WHITENING_EPSILON)
    return {i: (np.asarray(values_L, np.float64) - mean) * scale for i, values_L in values.items()}
