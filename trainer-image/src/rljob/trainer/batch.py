"""A replica's share of a batch: the microbatches of its plan, laid out as tensors.

Shapes: N samples of the batch, B rows, L positions, K = L − first: the positions from the first token of the model in
any row. Masks may have holes: a sample of several turns has several segments of the model. A row of a microbatch is a
sequence of a sample: all of it, unless it has branches. Values of tokens are by sample, of all its sequences together.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from rljob.api.algorithm import Algorithm
from rljob.protocol.batch_samples import BatchSample
from rljob.protocol.trainer_protocol import Train
from rljob.trainer.algorithms.aggregation import Aggregation
from rljob.trainer.algorithms.needs import failure, load_function
from rljob.trainer.algorithms.returned_values import numbers_of
from rljob.trainer.algorithms.sample_weights import sample_weights
from rljob.trainer.batch_plan import BatchPlan, BatchSequence
from rljob.trainer.process_group import World

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """Tokens of one sample: of its sequences, one after the other."""

    token_ids_L: NDArray[np.int64]
    logprobs_L: NDArray[np.float32]
    mask_L: NDArray[np.bool_]  # True at the model's tokens
    rewards_L: NDArray[np.float64]  # reward of each token
    turn_ends: tuple[int, ...] = ()  # position after each turn of the model but the last
    models: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """Role of a model of a frozen pool → log-probability of each token (L,), 0 except at the model's tokens."""

    @property
    def turns_L(self) -> NDArray[np.int64]:
        """Number of the turn of each of the model's tokens, from 0; other tokens have that of the next turn."""
        return np.searchsorted(self.turn_ends, np.arange(len(self.mask_L)), side="right")

    def part(self, piece: BatchSequence) -> Row:
        """Return the tokens of one sequence, to be computed in a forward pass."""
        if piece.tokens == len(self.token_ids_L):
            return self
        part = slice(piece.start, piece.end)
        return Row(self.token_ids_L[part], self.logprobs_L[part], self.mask_L[part], self.rewards_L[part])


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
    lengths: Sequence[int]  # tokens of each row without padding, at least 2


@dataclass
class MicrobatchInputs:
    """A microbatch and the inputs of its loss. A rank with fewer microbatches than others gets some without samples."""

    pieces: Sequence[BatchSequence]  # its rows
    tokens: Microbatch
    positions: int  # computed in a forward pass
    padding: int  # those without a token of a sample
    weights_B: Tensor  # weight of each row's tokens in the loss
    rewards_B: Tensor  # reward of each row's sample
    turns_BK: Tensor  # number of the turn of each token, from 0
    turns: int  # largest number of turns of a row
    current_B: Tensor  # bool: rows whose tokens are all of the version that the batch is applied to
    tasks_B: Tensor | None = None  # number of the task of each row; None: there is one
    advantages_BK: Tensor = field(init=False)  # set once the advantages are known
    selected_BK: Tensor | None = None  # bool: tokens that the objective selects; None if it declares no selection


@dataclass(frozen=True)
class Batch:
    """A batch: its scalars, and the rows and microbatches of this replica."""

    train: Train
    rows: Mapping[int, Row]  # by index in the batch
    minibatches: list[list[MicrobatchInputs]]
    has_current: bool  # whether any rank has a trained row of the current version in the first minibatch


def lay_out(plan: BatchPlan, rows: Mapping[int, Row], algorithm: Algorithm, world: World) -> Batch:
    """Return the batch with this replica's microbatches of each minibatch.

    Args:
        plan: of the batch, for this replica.
        rows: this replica's samples by index in the batch.
        algorithm: resolved.
        world: the ranks.

    Raises:
        UnrecoverableError: the aggregation fails on any rank.
    """
    samples = plan.train.samples
    weights_N = _weights(samples, plan.minibatches, algorithm, world)
    minibatches = [
        [_inputs([plan.rows[row] for row in own], rows, plan, weights_N, world.device) for own in microbatches]
        for microbatches in plan.microbatches
    ]
    return Batch(plan.train, rows, minibatches, any(is_current(plan.train, i) for i in plan.first_trained))


def task_names(train: Train) -> tuple[str, ...]:
    """Return the names of the tasks of a batch, sorted; none if there is one."""
    names = sorted({sample.task for sample in train.samples})
    return tuple(names) if len(names) > 1 else ()


def is_current(train: Train, i: int) -> bool:
    """Return whether a sample was generated by the weights that its batch is applied to, and by no older ones."""
    return train.compare_logprobs and train.samples[i].min_version == train.step


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
    weights_N, factors_N = np.zeros(len(samples), np.float32), sample_weights(samples, algorithm)
    problem = None
    try:
        for minibatch in minibatches:
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # checked below
                returned, size = aggregation(tokens_N[minibatch], limits_N[minibatch]), len(minibatch)
                found = numbers_of(returned, size, f"{size} samples")
                weights_N[minibatch] = np.where(tokens_N[minibatch] > 0, found * factors_N[minibatch], 0)
            if (weights_N < 0).any():
                raise ValueError("it returned a weight below 0; the weight of each sample must be at least 0")
            if not np.isfinite(weights_N).all():
                raise ValueError("it returned nan or an infinite number in float32")
    except Exception as error:  # noqa: BLE001 a user's aggregation may raise anything: the run ends
        problem = failure(algorithm, "aggregation", error)
    world.raise_first_error(problem)
    return weights_N


def _inputs(
    pieces: Sequence[BatchSequence],
    rows: Mapping[int, Row],
    plan: BatchPlan,
    weights_N: NDArray[np.float32],
    device: torch.device,
) -> MicrobatchInputs:
    train, numbers = plan.train, {name: number for number, name in enumerate(task_names(plan.train))}
    of_pieces = [rows[piece.sample].part(piece) for piece in pieces]
    tokens = collate(of_pieces, [train.samples[piece.sample].temperature for piece in pieces], device)
    turns = {piece.sample: rows[piece.sample].turns_L for piece in pieces}

    positions = sum(tokens.lengths) if plan.packed else tokens.token_ids_BL.numel()

    def of_rows(values: Iterable[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(list(values) or [0], dtype=dtype, device=device)

    return MicrobatchInputs(
        pieces,
        tokens,
        positions,
        positions - sum(piece.tokens for piece in pieces),
        of_rows((float(weights_N[piece.sample]) for piece in pieces), torch.float32),
        of_rows((train.samples[piece.sample].reward for piece in pieces), torch.float32),
        at_targets(pieces, tokens, turns, np.int64),
        1 + max((len(rows[piece.sample].turn_ends) for piece in pieces), default=0),
        of_rows((is_current(train, piece.sample) for piece in pieces), torch.bool),
        of_rows((numbers[train.samples[piece.sample].task] for piece in pieces), torch.int64) if numbers else None,
    )


def at_targets(
    pieces: Sequence[BatchSequence], tokens: Microbatch, values: Mapping[int, NDArray[np.generic]], dtype: DTypeLike
) -> Tensor:
    """Return values of tokens of the rows of a microbatch as a tensor (B, K); 0 except at the model's tokens.

    Args:
        pieces: its rows.
        tokens: of the microbatch.
        values: an array (L,) for each sample, by index in the batch.
        dtype: of the result.
    """
    values_BK = np.zeros(tokens.mask_BK.shape, dtype)
    for b, piece in enumerate(pieces):
        kept = values[piece.sample][piece.start + tokens.first : piece.end]
        values_BK[b, : len(kept)] = kept
    return torch.from_numpy(values_BK).to(tokens.mask_BK.device).where(tokens.mask_BK, 0)


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
        lengths=[max(2, len(row.token_ids_L)) for row in rows],
    )
