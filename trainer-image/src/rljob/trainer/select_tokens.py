"""Calls the selection of the objective once per batch, and gives each microbatch its part.

Shapes: B rows of a microbatch, K positions of a row that may hold the model's tokens, L tokens of a sample, T tokens of
the model of this replica's samples.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rljob.api.algorithm import Algorithm
from rljob.trainer.algorithms.needs import failure, load_function
from rljob.trainer.algorithms.token_selection import Bools, Floats, Selection, SelectionInputs, selection_of
from rljob.trainer.batch import Batch, MicrobatchInputs, at_targets
from rljob.trainer.process_group import World
from rljob.trainer.scores import Scores


def select_tokens(batch: Batch, scores: Scores, algorithm: Algorithm, world: World) -> None:
    """Store in the microbatches which tokens the objective selects, if it declares a selection; all ranks take part.

    Args:
        batch: this replica's microbatches, with advantages.
        scores: with the log-probabilities before the batch.
        algorithm: resolved.
        world: the ranks.

    Raises:
        UnrecoverableError: the selection fails on any rank.
    """
    selection = selection_of(load_function(algorithm, "objective"))
    if selection is None:
        return
    problem = None
    try:
        selected_T = selected_tokens(selection, _inputs(batch, scores, algorithm, world))
        start = 0
        for microbatch in _microbatches(batch):
            mask_BK = microbatch.tokens.mask_BK
            end = start + int(mask_BK.sum())
            part_T = torch.from_numpy(selected_T[start:end]).to(mask_BK.device)
            microbatch.selected_BK = torch.zeros_like(mask_BK).masked_scatter(mask_BK, part_T)
            start = end
    except torch.distributed.DistError:  # a collective of the selection: another rank has failed
        raise
    except Exception as error:  # noqa: BLE001 a user's selection may raise anything: the run ends
        problem = failure(algorithm, "objective", error)
    world.raise_first_error(problem)


def selected_tokens(selection: Selection, inputs: SelectionInputs) -> Bools:
    """Return whether each token is selected (T,).

    Raises:
        ValueError: the selection returned an array of another shape or type.
    """
    selected_T = np.asarray(selection(inputs))
    if selected_T.shape != inputs.samples_T.shape or selected_T.dtype != np.bool_:
        found = f"shape {selected_T.shape} and type {selected_T.dtype}"
        raise ValueError(f"its selection has {found}, not shape {inputs.samples_T.shape} and type bool")
    return selected_T


def log_ratio_before(old_T: Floats, behavior_T: Floats, algorithm: Algorithm) -> Floats:
    """Return log π/π_denominator of the policy before the batch (T,); 0 for ``ratio: proximal``."""
    return old_T - behavior_T if algorithm.ratio == "behavior" else np.zeros_like(old_T)


def _microbatches(batch: Batch) -> list[MicrobatchInputs]:
    return [inputs for minibatch in batch.minibatches for inputs in minibatch]


def _inputs(batch: Batch, scores: Scores, algorithm: Algorithm, world: World) -> SelectionInputs:
    microbatches = _microbatches(batch)
    old = [old_BK for minibatch in scores.old for old_BK in (minibatch or [])]
    samples = batch.train.samples
    keys = {i: token_keys(batch.train.step, samples[i].sample, len(row.mask_L)) for i, row in batch.rows.items()}
    owners = {i: np.full(len(row.mask_L), i) for i, row in batch.rows.items()}
    rows = [(each.pieces, each.tokens) for each in microbatches]
    old_T = _tokens(microbatches, old)
    behavior_T = _tokens(microbatches, [tokens.behavior_BK for _, tokens in rows])
    return SelectionInputs(
        samples_T=_tokens(microbatches, [at_targets(*each, owners, np.int64) for each in rows]).astype(np.int64),
        samples=len(samples),
        advantages_T=_tokens(microbatches, [each.advantages_BK for each in microbatches]),
        logprobs_T=old_T,
        log_ratio_T=log_ratio_before(old_T, behavior_T, algorithm),
        keys_T=_tokens(microbatches, [at_targets(*each, keys, np.float64) for each in rows]),
        world=world,
        algorithm=algorithm,
    )


def _tokens(microbatches: list[MicrobatchInputs], values: list[Tensor]) -> Floats:
    """Return the values (B, K) of all microbatches at the model's tokens, one after the other (T,)."""
    parts = [
        values_BK[inputs.tokens.mask_BK].double().cpu().numpy()
        for inputs, values_BK in zip(microbatches, values, strict=True)
    ]
    return np.concatenate(parts) if parts else np.zeros(0)


def token_keys(step: int, sample: str, length: int) -> NDArray[np.float64]:
    """Return a random number in [0, 1) for each token of a sample (length,), the same on every rank and in every order.

    Args:
        step: of training.
        sample: its name.
        length: number of its tokens.
    """
    digest = hashlib.blake2b(sample.encode(), digest_size=16).digest()
    return np.random.default_rng([step, *np.frombuffer(digest, np.uint32).tolist()]).random(length)
