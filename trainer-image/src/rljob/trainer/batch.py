"""A replica's share of a batch: split into minibatches and microbatches and laid out as tensors.

Shapes: N samples of the batch, B rows, L positions, K = L − first: the positions from the first token of the model in
any row. Masks may have holes: a sample of several turns has several segments of the model.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rljob.api.algorithm import Algorithm
from rljob.protocol.messages import BatchSample, Train
from rljob.scheduling.shards import assign
from rljob.trainer.algorithms.aggregation import Aggregation
from rljob.trainer.algorithms.needs import failure, load_function
from rljob.trainer.process_group import World

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """Tokens of one sample."""

    token_ids_L: NDArray[np.int64]
    logprobs_L: NDArray[np.float32]
    mask_L: NDArray[np.bool_]  # True at the model's tokens
    rewards_L: NDArray[np.float64]  # reward of each token


@dataclass(frozen=True)
class Microbatch:
    """Rows of one forward pass, padded on the right. The logits at ``keep_K[k]`` predict target k."""

    token_ids_BL: Tensor
    keep_K: Tensor  # positions whose logits are needed
    targets_BK: Tensor
    mask_BK: Tensor
    behavior_BK: Tensor  # the engine's log-probabilities
    temperature_B: Tensor
    first: int  # position of target 0


@dataclass
class MicrobatchInputs:
    """A microbatch and the inputs of its loss. A rank with fewer microbatches than others gets some without samples."""

    indices: Sequence[int]  # of its samples in the batch
    tokens: Microbatch
    padding: int  # number of positions without a token of a sample
    weights_B: Tensor  # weight of each row's tokens in the loss
    advantages_BK: Tensor = field(init=False)  # set once the advantages are known


@dataclass(frozen=True)
class Batch:
    """A batch: its scalars, and the rows and microbatches of this replica."""

    train: Train
    rows: Mapping[int, Row]  # by index in the batch
    minibatches: list[list[MicrobatchInputs]]


def lay_out(train: Train, rows: Mapping[int, Row], algorithm: Algorithm, world: World, budget: int) -> Batch:
    """Return the batch with this replica's microbatches of each minibatch.

    Args:
        train: the batch's scalars.
        rows: this replica's samples by index in the batch.
        algorithm: resolved.
        world: the ranks.
        budget: maximum number of padded tokens of a microbatch.

    Raises:
        UnrecoverableError: the aggregation fails on any rank.
    """
    samples, tokens = train.samples, lengths(train.samples)
    parts = split_minibatches([sample.group for sample in samples], algorithm.minibatches or 1)
    weights_N = _weights(samples, parts, algorithm, world)
    minibatches = []
    for minibatch in parts:
        mine = plan_ranks(minibatch, tokens, world.dp_size, budget)[world.dp_rank]
        minibatches.append([_inputs(indices, rows, samples, weights_N, world.device) for indices in mine])
    return Batch(train, rows, minibatches)


def _weights(
    samples: Sequence[BatchSample], minibatches: Sequence[Sequence[int]], algorithm: Algorithm, world: World
) -> NDArray[np.float32]:
    """Return the weight of each sample's tokens in the loss of its minibatch (N,); 0 for a sample without tokens.

    Raises:
        UnrecoverableError: the aggregation fails on any rank.
    """
    aggregation: Aggregation = load_function(algorithm, "aggregation")
    tokens_N = np.asarray([sample.response_tokens for sample in samples], dtype=np.int64)
    limits_N = np.asarray([sample.max_tokens for sample in samples], dtype=np.int64)
    weights_N = np.zeros(len(samples), np.float32)
    problem = None
    try:
        for minibatch in minibatches:
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # checked below
                found = np.asarray(aggregation(tokens_N[minibatch], limits_N[minibatch]))
                if found.shape != (len(minibatch),):
                    raise ValueError(f"it returned an array of shape {found.shape} for {len(minibatch)} samples")
                weights_N[minibatch] = np.where(tokens_N[minibatch] > 0, found, 0)
            if not np.isfinite(weights_N).all():
                raise ValueError("it returned nan or an infinite number in float32")
    except Exception as error:  # noqa: BLE001 a user's aggregation may raise anything: the run ends
        problem = failure(algorithm, "aggregation", error)
    world.raise_first_error(problem)
    return weights_N


def _inputs(
    indices: Sequence[int],
    rows: Mapping[int, Row],
    samples: Sequence[BatchSample],
    weights_N: NDArray[np.float32],
    device: torch.device,
) -> MicrobatchInputs:
    tokens = collate([rows[i] for i in indices], [samples[i].temperature for i in indices], device)
    return MicrobatchInputs(
        indices,
        tokens,
        tokens.token_ids_BL.numel() - sum(len(rows[i].token_ids_L) for i in indices),
        torch.tensor([float(weights_N[i]) for i in indices] or [0.0], dtype=torch.float32, device=device),
    )


def at_targets(inputs: MicrobatchInputs, values: Mapping[int, NDArray[np.float32]]) -> Tensor:
    """Return values of tokens of the rows of a microbatch as a tensor (B, K); 0 except at the model's tokens.

    Args:
        inputs: the microbatch.
        values: an array (L,) for each row, by index in the batch.
    """
    values_BK = np.zeros(inputs.tokens.mask_BK.shape, np.float32)
    for b, i in enumerate(inputs.indices):
        kept = values[i][inputs.tokens.first :]
        values_BK[b, : len(kept)] = kept
    return torch.from_numpy(values_BK).to(inputs.tokens.mask_BK.device).where(inputs.tokens.mask_BK, 0.0)


def lengths(samples: Sequence[BatchSample]) -> list[int]:
    """Return the length of each sample in tokens: prompt, answers and observations."""
    return [sample.total_tokens for sample in samples]


def plan_microbatches(indices: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return ``indices`` split into microbatches, longest samples first.

    Args:
        indices: samples of one rank.
        lengths: tokens of each sample of the batch.
        budget: maximum number of padded tokens of a microbatch; a longer sample is a microbatch of its own.
    """
    plan: list[list[int]] = []
    for index in sorted(indices, key=lambda i: (-lengths[i], i)):
        if plan and lengths[plan[-1][0]] * (len(plan[-1]) + 1) <= budget:
            plan[-1].append(index)
        else:
            plan.append([index])
    return plan


def plan_ranks(minibatch: Sequence[int], lengths: Sequence[int], ranks: int, budget: int) -> list[list[list[int]]]:
    """Return each data-parallel rank's microbatches of a minibatch, the same number for all ranks.

    A rank with fewer samples gets empty microbatches, because all ranks take part in the collectives of every pass.

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
    """Return the samples of each minibatch, in the order of the batch: whole groups if there are enough groups.

    Args:
        groups: group of each sample; members are adjacent.
        minibatches: number of minibatches, at most the number of samples.
    """
    starts = [i for i, group in enumerate(groups) if i == 0 or groups[i - 1] != group]
    if len(starts) < minibatches:
        starts = list(range(len(groups)))
    bounds = [starts[part[0]] for part in np.array_split(np.arange(len(starts)), minibatches)] + [len(groups)]
    return [list(range(start, end)) for start, end in itertools.pairwise(bounds)]


def collate(rows: Sequence[Row], temperatures: Sequence[float], device: torch.device) -> Microbatch:
    """Return the rows as tensors on ``device``; without rows, one row of two tokens outside the loss mask."""
    if not rows:
        empty = Row(np.zeros(2, np.int64), np.zeros(2, np.float32), np.zeros(2, np.bool_), np.zeros(2))
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
        first=first,
    )
