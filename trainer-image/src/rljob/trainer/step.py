"""One training step: from a batch's scalars and this rank's rows to updated weights.

The loss of a minibatch is a sum over its tokens with weights that every rank knows from the scalars, so gradients do
not depend on how samples are spread over ranks and microbatches.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rljob.api.algorithm import Algorithm
from rljob.api.extensions import OBJECTIVES, load
from rljob.protocol.messages import BatchSample, Train
from rljob.trainer.advantages import advantages
from rljob.trainer.batch import Microbatch, Row, collate, lengths, plan_ranks, split_minibatches
from rljob.trainer.errors import UnrecoverableError
from rljob.trainer.fsdp import FsdpBackend
from rljob.trainer.losses import aggregation_weights, masked_sum
from rljob.trainer.metrics import Stopwatch, TokenStatistics, advantage_figures, memory_peak
from rljob.trainer.process_group import World

log = logging.getLogger(__name__)

FIRST_STEP_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Piece:
    """A microbatch with what the loss needs beside its tokens; where a rank has nothing to do, a row of weight 0."""

    indices: Sequence[int]  # in the batch
    tokens: Microbatch
    padding: int  # positions without a token of a sample
    advantages_B: Tensor
    weights_B: Tensor


@dataclass(frozen=True)
class Applied:
    """What a step was."""

    figures: dict[str, float]  # see metrics.METRICS
    advantages_N: NDArray[np.float32]  # as used, of each sample in the batch's order


def plan_step(train: Train, rows: dict[int, Row], algorithm: Algorithm, world: World, budget: int) -> list[list[Piece]]:
    """Return this rank's microbatches of each minibatch.

    Args:
        train: the batch's scalars.
        rows: this rank's samples by index in the batch.
        algorithm: resolved.
        world: the ranks.
        budget: padded tokens of a microbatch.
    """
    samples, tokens = train.samples, lengths(train.samples)
    groups = [sample.group for sample in samples]
    values_N = advantages(str(algorithm.advantage), [sample.reward for sample in samples], groups)
    minibatches = []
    for minibatch in split_minibatches(groups, algorithm.minibatches or 1):
        weights = aggregation_weights(
            str(algorithm.aggregation),
            [samples[i].response_tokens for i in minibatch],
            [samples[i].max_tokens for i in minibatch],
        )
        weight = dict(zip(minibatch, weights.tolist(), strict=True))
        mine = plan_ranks(minibatch, tokens, world.dp_size, budget)[world.dp_rank]
        minibatches.append([_piece(indices, rows, samples, values_N, weight, world.device) for indices in mine])
    return minibatches


def _piece(
    indices: Sequence[int],
    rows: dict[int, Row],
    samples: Sequence[BatchSample],
    advantages_N: NDArray[np.float64],
    weight: dict[int, float],
    device: torch.device,
) -> Piece:
    tokens = collate([rows[i] for i in indices], [samples[i].temperature for i in indices], device)
    return Piece(
        indices,
        tokens,
        tokens.token_ids_BL.numel() - sum(len(rows[i].token_ids_L) for i in indices),
        torch.tensor([advantages_N[i] for i in indices] or [0.0], dtype=torch.float32, device=device),
        torch.tensor([weight[i] for i in indices] or [0.0], dtype=torch.float32, device=device),
    )


def apply_batch(
    train: Train, rows: dict[int, Row], algorithm: Algorithm, backend: FsdpBackend, world: World, budget: int
) -> Applied:
    """Apply a batch to the weights. All ranks call this together and get the same, but for seconds.

    Args:
        train: the batch.
        rows: this rank's samples by index in the batch.
        algorithm: resolved.
        backend: model and optimizer.
        world: the ranks.
        budget: padded tokens of a microbatch.

    Raises:
        UnrecoverableError: the gradient is not finite, or at the run's first step the engine's log-probabilities are
            not the trainer's.
    """
    minibatches = plan_step(train, rows, algorithm, world, budget)
    statistics, watch = TokenStatistics(world.device), Stopwatch(world.device)
    with watch.time("seconds_forward"):
        proximal = _proximal(minibatches, backend)
    figures: dict[str, float] = {}
    norms = []
    for minibatch, olds in zip(minibatches, proximal, strict=True):
        for piece, old_BK in zip(minibatch, olds, strict=True):
            with watch.time("seconds_forward"):
                loss = _loss(piece, old_BK, algorithm, backend, statistics)
            with watch.time("seconds_backward"):
                backend.backward(loss)
        if train.first_of_run and backend.updates == 0:
            figures |= _compare_first_step(train, statistics.largest_mismatch(world), backend.dtype)
        with watch.time("seconds_optimizer"):
            norm, figures["learning_rate"] = backend.update(train.step)
        norms.append(norm)
    used_N = _advantages_used(minibatches, len(train.samples), world)
    figures |= statistics.figures(world, len(minibatches)) | advantage_figures(used_N) | watch.figures()
    figures |= {"grad_norm": sum(norms) / len(norms), "memory_peak_bytes": memory_peak(world)}
    return Applied(figures, used_N.numpy())


def _proximal(minibatches: list[list[Piece]], backend: FsdpBackend) -> list[list[Tensor | None]]:
    """Return the log-probabilities at the start of the batch; None where the first pass gives them anyway."""
    if len(minibatches) == 1:
        return [[None] * len(minibatches[0])]
    with torch.no_grad():
        return [[backend.logprobs(piece.tokens) for piece in minibatch] for minibatch in minibatches]


def _loss(
    piece: Piece, old_BK: Tensor | None, algorithm: Algorithm, backend: FsdpBackend, statistics: TokenStatistics
) -> Tensor:
    """Return a microbatch's share of its minibatch's loss, counted in ``statistics``."""
    tokens = piece.tokens
    logprobs_BK = backend.logprobs(tokens)
    if old_BK is None:
        old_BK = logprobs_BK.detach()
    assert algorithm.clip_low is not None and algorithm.clip_high is not None
    objective = load(OBJECTIVES, str(algorithm.objective), "algorithm.objective")(
        logprobs_BK,
        tokens.behavior_BK if algorithm.ratio == "behavior" else old_BK,
        piece.advantages_B,
        algorithm.clip_low,
        algorithm.clip_high,
        algorithm.dual_clip,
    )
    loss = -masked_sum(objective.values_BK, tokens.mask_BK, piece.weights_B)
    statistics.add(
        loss.detach(),
        objective,
        old_BK,
        tokens.behavior_BK,
        tokens.mask_BK,
        tokens.token_ids_BL.numel(),
        piece.padding,
    )
    return loss


def _advantages_used(minibatches: list[list[Piece]], samples: int, world: World) -> Tensor:
    """Return the advantage that went into the loss of each sample of the batch, on whatever rank; all take part."""
    used_N = torch.zeros(samples, dtype=torch.float32, device=world.device)
    for minibatch in minibatches:
        for piece in minibatch:
            if piece.indices:
                used_N[torch.tensor(piece.indices, device=world.device)] = piece.advantages_B
    return world.sum_over_data(used_N).cpu()  # each sample is in one piece of one rank: nothing but zeros is added


def _compare_first_step(train: Train, error: float, dtype: torch.dtype) -> dict[str, float]:
    """Check that engine and trainer mean the same by a log-probability, while both have the same weights."""
    if train.step != 0 or any(sample.min_version != 0 for sample in train.samples):
        return {}
    if not error <= FIRST_STEP_TOLERANCE:
        sentence = (
            f"at the first step the engine's log-probabilities differ from the trainer's by up to {error:.2e} where "
            f"{FIRST_STEP_TOLERANCE:.0e} is allowed; both must use the same weights, dtype and temperature"
        )
        if dtype == torch.float32:
            raise UnrecoverableError(sentence)
        log.warning("%s (%s: only a warning)", sentence, dtype)
    return {"first_step_logprob_error": error}
