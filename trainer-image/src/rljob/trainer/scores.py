"""Scores: results of forward passes over a batch before its first update, computed if the algorithm needs them.

Shapes: B rows of a microbatch, K positions of a row that may hold the model's tokens, L tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rljob.api.algorithm import Algorithm
from rljob.api.algorithm_presets import model_pools, needs_old_first
from rljob.trainer.algorithms.needs import load_function, needs, needs_of
from rljob.trainer.algorithms.token_selection import selection_of
from rljob.trainer.backends.base import Backend, Critic, FrozenModel
from rljob.trainer.batch import Batch, at_targets
from rljob.trainer.errors import UnrecoverableError


@dataclass(frozen=True)
class Scores:
    """Scores of this replica's samples."""

    batch: Batch
    old: Sequence[list[Tensor] | None]
    """Log-probabilities (B, K) under the weights before the batch, of each microbatch of each minibatch; None for a
    minibatch that does not need them, or for which the first forward pass of its update computes them."""
    frozen: Mapping[str, Sequence[list[Tensor]]]
    """Log-probabilities (B, K) under each model that is not trained, by its role: ``reference``, ``teacher``. Those of
    models of frozen pools came with the samples."""
    values: Sequence[list[Tensor]] | None = None
    """Values (B, K) of the critic before the batch, of each microbatch of each minibatch; None without a critic."""

    def old_by_row(self) -> dict[int, NDArray[np.float32]]:
        """Return the log-probabilities (L,) before the batch by index in the batch; 0 except at the model's tokens.

        Raises:
            ValueError: the log-probabilities were not computed.
        """
        known = [outputs for outputs in self.old if outputs is not None]
        if len(known) < len(self.old):
            raise ValueError("there are no old log-probabilities; declare @requires(old=True)")
        return self._by_row(known)

    def reference_by_row(self) -> dict[int, NDArray[np.float32]]:
        """Return the log-probabilities (L,) of the reference model, as :meth:`old_by_row`.

        Raises:
            ValueError: they were not computed.
        """
        if "reference" not in self.frozen:
            raise ValueError("there is no reference model; declare @requires(reference=True)")
        return self._by_row(self.frozen["reference"])

    def teacher_by_row(self) -> dict[int, NDArray[np.float32]]:
        """Return the log-probabilities (L,) of the teacher, as :meth:`old_by_row`.

        Raises:
            ValueError: they were not computed.
        """
        if "teacher" not in self.frozen:
            raise ValueError("there is no teacher; set spec.algorithm.teacherModel")
        return self._by_row(self.frozen["teacher"])

    def values_by_row(self) -> dict[int, NDArray[np.float32]]:
        """Return the critic's value (L,) of the state before each of the model's tokens, as :meth:`old_by_row`.

        Raises:
            ValueError: there is no critic.
        """
        if self.values is None:
            raise ValueError("there is no critic; declare @requires(values=True) and set spec.algorithm.criticModel")
        return self._by_row(self.values)

    def _by_row(self, scores: Sequence[list[Tensor]]) -> dict[int, NDArray[np.float32]]:
        result = {i: np.zeros(len(row.mask_L), np.float32) for i, row in self.batch.rows.items()}
        for minibatch, outputs in zip(self.batch.minibatches, scores, strict=True):
            for inputs, scores_BK in zip(minibatch, outputs, strict=True):
                values_BK = scores_BK.float().cpu().numpy()
                for b, piece in enumerate(inputs.pieces):
                    part = slice(piece.start + inputs.tokens.first, piece.end)
                    mask_K = self.batch.rows[piece.sample].mask_L[part]
                    result[piece.sample][part] = np.where(mask_K, values_BK[b, : len(mask_K)], np.float32(0))
        return result


def score(
    batch: Batch,
    backend: Backend,
    algorithm: Algorithm,
    frozen: Mapping[str, FrozenModel],
    critic: Critic | None = None,
) -> Scores:
    """Return the scores that the algorithm needs, from forward passes of the microbatches.

    An advantage that needs the old log-probabilities needs all of them, as do a KL term in the reward, a teacher and a
    selection of tokens. A loss that needs them does not need those of the first minibatch: its own forward pass runs
    before the first update, so it computes the same numbers.

    Args:
        batch: with rows and microbatches of this replica.
        backend: the policy.
        algorithm: resolved.
        frozen: models of this trainer that are not trained, by role.
        critic: if the algorithm has one.
    """
    everywhere = needs_of(load_function(algorithm, "advantage")).old or needs_old_first(algorithm)
    everywhere = everywhere or selection_of(load_function(algorithm, "objective")) is not None
    later = needs(algorithm).old
    old: list[list[Tensor] | None] = []
    for number, minibatch in enumerate(batch.minibatches):
        if everywhere or (later and number > 0):
            outputs = backend.run([inputs.tokens for inputs in minibatch], None)
            old.append([output.logprobs_BK for output in outputs])
        else:
            old.append(None)
    of_models: dict[FrozenModel, list[list[Tensor]]] = {}  # a model with two roles runs once
    for model in dict.fromkeys(frozen.values()):
        passes = [model.run([inputs.tokens for inputs in minibatch]) for minibatch in batch.minibatches]
        of_models[model] = [[output.logprobs_BK for output in outputs] for outputs in passes]
    values = None
    if critic is not None:
        values = [critic.run([inputs.tokens for inputs in minibatch], None) for minibatch in batch.minibatches]
    of_roles = {role: of_models[model] for role, model in frozen.items()}
    of_roles |= {role: _of_pool(batch, role) for role in model_pools(algorithm)}
    return Scores(batch, old, of_roles, values)


def _of_pool(batch: Batch, role: str) -> list[list[Tensor]]:
    """Return the log-probabilities (B, K) that came with the samples, of each microbatch of each minibatch.

    Raises:
        UnrecoverableError: a sample has none.
    """
    for i, row in batch.rows.items():
        if role not in row.models:
            raise UnrecoverableError(f"sample {batch.train.samples[i].sample} has no log-probabilities of the {role}")
    values = {i: row.models[role] for i, row in batch.rows.items()}
    return [
        [at_targets(inputs.pieces, inputs.tokens, values, np.float32) for inputs in minibatch]
        for minibatch in batch.minibatches
    ]
