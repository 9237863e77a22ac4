"""A rank's share of a batch: cut into microbatches and laid out as tensors.

Shapes: B rows, L positions, K = L − first: the positions from the first that any row's model wrote.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rljob.protocol.messages import BatchSample
from rljob.scheduling.shards import assign


@dataclass(frozen=True)
class Row:
    """Tokens of one sample."""

    token_ids_L: NDArray[np.int64]
    logprobs_L: NDArray[np.float32]
    mask_L: NDArray[np.bool_]  # where the model wrote
    rewards_L: NDArray[np.float64] | None = None
    """Reward that arrives at each token; None: the sample's whole reward at the last token that the model wrote."""


@dataclass(frozen=True)
class Microbatch:
    """Rows of one forward pass, padded on the right. Position k of the K ones predicts target k."""

    token_ids_BL: Tensor
    keep_K: Tensor  # positions whose logits are needed
    targets_BK: Tensor
    mask_BK: Tensor
    behavior_BK: Tensor  # the engine's log-probabilities
    temperature_B: Tensor


def lengths(samples: Sequence[BatchSample]) -> list[int]:
    """Return the length of each sample in tokens: prompt, model and observations."""
    return [sample.total_tokens for sample in samples]


def plan_microbatches(indices: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return ``indices`` cut into microbatches, longest samples first.

    Args:
        indices: samples of one rank.
        lengths: tokens of each sample of the batch.
        budget: padded tokens of a microbatch; a longer sample goes alone.
    """
    plan: list[list[int]] = []
    for index in sorted(indices, key=lambda i: (-lengths[i], i)):
        if plan and lengths[plan[-1][0]] * (len(plan[-1]) + 1) <= budget:
            plan[-1].append(index)
        else:
            plan.append([index])
    return plan


def plan_ranks(minibatch: Sequence[int], lengths: Sequence[int], ranks: int, budget: int) -> list[list[list[int]]]:
    """Return for each rank its microbatches of a minibatch, the same number for all.

    A rank with fewer takes part in the collectives of every forward and backward pass through empty ones.

    Args:
        minibatch: samples of the global minibatch.
        lengths: tokens of each sample of the batch.
        ranks: data-parallel ranks.
        budget: padded tokens of a microbatch.
    """
    chosen = set(minibatch)
    plans = [plan_microbatches([i for i in shard if i in chosen], lengths, budget) for shard in assign(lengths, ranks)]
    most = max(len(plan) for plan in plans)
    return [plan + [[] for _ in range(most - len(plan))] for plan in plans]


def split_minibatches(groups: Sequence[str], minibatches: int) -> list[list[int]]:
    """Return the samples of each minibatch, in the batch's order: whole groups while there are enough of them.

    Args:
        groups: group of each sample; members are neighbours.
        minibatches: parts to make, at most as many as there are samples.
    """
    starts = [i for i, group in enumerate(groups) if i == 0 or groups[i - 1] != group]
    if len(starts) < minibatches:
        starts = list(range(len(groups)))
    bounds = [starts[part[0]] for part in np.array_split(np.arange(len(starts)), minibatches)] + [len(groups)]
    return [list(range(start, end)) for start, end in itertools.pairwise(bounds)]


def collate(rows: Sequence[Row], temperatures: Sequence[float], device: torch.device) -> Microbatch:
    """Return the rows as tensors on ``device``; with no rows, one of two tokens that the model did not write."""
    if not rows:
        empty = Row(np.zeros(2, np.int64), np.zeros(2, np.float32), np.zeros(2, np.bool_))
        rows, temperatures = [empty], [1.0]
    length = max(2, *(len(row.token_ids_L) for row in rows))
    token_ids_BL = np.zeros((len(rows), length), np.int64)
    behavior_BL = np.zeros((len(rows), length), np.float32)
    mask_BL = np.zeros((len(rows), length), np.bool_)
    for b, row in enumerate(rows):
        token_ids_BL[b, : len(row.token_ids_L)] = row.token_ids_L
        behavior_BL[b, : len(row.logprobs_L)] = row.logprobs_L
        mask_BL[b, : len(row.mask_L)] = row.mask_L
    first = int(mask_BL.any(axis=0).argmax()) if mask_BL.any() else length - 1

    def tensor(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return Microbatch(
        token_ids_BL=tensor(token_ids_BL),
        keep_K=torch.arange(first - 1, length - 1, device=device),
        targets_BK=tensor(token_ids_BL[:, first:]),
        mask_BK=tensor(mask_BL[:, first:]),
        behavior_BK=tensor(behavior_BL[:, first:]),
        temperature_B=torch.tensor(list(temperatures), dtype=torch.float32, device=device),
    )
