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
from rljob.api.algorithm_presets import model_pools, needs_old_first, teacher_roles
from rljob.trainer.algorithms.advantages.base import Floats
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
    """Log-probabilities (B, K) under models that are not trained, by their kind: ``reference``, ``teacher``. Those of
    models of frozen pools came with the samples. The teacher is that of :func:`mean_of_teachers`."""
    values: Sequence[list[Tensor]] | None = None
    """Values (B, K) of the critic before the batch, of each microbatch of each minibatch; None without a critic."""
    teacher: Mapping[int, Floats] | None = None
    """What :func:`mean_of_teachers` returned; None without teachers."""

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
            raise ValueError(
                "there is no reference; declare @requires(reference=True), and set referenceModel or referencePool"
            )
        return self._by_row(self.frozen["reference"])

    def teacher_by_row(self) -> dict[int, Floats]:
        """Return the log-probabilities (L,) of the teacher, as :meth:`old_by_row`; of several ones their mean, and
        nan in samples whose task has none, see :func:`mean_of_teachers`.

        Raises:
            ValueError: they were not computed.
        """
        if self.teacher is None:
            raise ValueError("there is no teacher; set spec.algorithm.teachers, each with a model or a pool")
        return dict(self.teacher)

    def values_by_row(self) -> dict[int, NDArray[np.float32]]:
        """Return the critic's value (L,) of the state before each of the model's tokens, as :meth:`old_by_row`.

        Raises:
            ValueError: there is no critic.
        """
        if self.values is None:
            raise ValueError("there is no critic; declare @requires(values=True) and set spec.algorithm.criticModel")
        return self._by_row(self.values)

    def _by_row(self, scores: Sequence[list[Tensor]]) -> dict[int, NDArray[np.float32]]:
        return by_row(self.batch, scores)


def by_row(batch: Batch, scores: Sequence[list[Tensor]]) -> dict[int, NDArray[np.float32]]:
    """Return scores (B, K) of each microbatch of each minibatch as an array (L,) for each row; 0 except at the model's
    tokens."""
    result = {i: np.zeros(len(row.mask_L), np.float32) for i, row in batch.rows.items()}
    for minibatch, outputs in zip(batch.minibatches, scores, strict=True):
        for inputs, scores_BK in zip(minibatch, outputs, strict=True):
            values_BK = scores_BK.float().cpu().numpy()
            for b, piece in enumerate(inputs.pieces):
                part = slice(piece.start + inputs.tokens.first, piece.end)
                mask_K = batch.rows[piece.sample].mask_L[part]
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

    An advantage that needs the old log-probabilities needs all of them, as do a KL term in the reward, teachers and a
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
    found, teacher = {}, None
    if "reference" in frozen:
        found["reference"] = of_models[frozen["reference"]]
    elif "reference" in model_pools(algorithm):
        found["reference"] = _at_targets(batch, {i: _of_pool(batch, i, "reference") for i in batch.rows})
    if algorithm.teachers:
        here = [role for role in teacher_roles(algorithm) if role in frozen]
        teacher = mean_of_teachers(batch, algorithm, {role: by_row(batch, of_models[frozen[role]]) for role in here})
        found["teacher"] = _at_targets(batch, teacher)
    return Scores(batch, old, found, values, teacher)


def mean_of_teachers(
    batch: Batch, algorithm: Algorithm, in_trainer: Mapping[str, Mapping[int, NDArray[np.float32]]]
) -> dict[int, Floats]:
    """Return Σ weight·l_teacher / Σ weight over the teachers of its task for each row (L,); nan if there are none.

    Args:
        batch: of this replica.
        algorithm: resolved.
        in_trainer: role → log-probabilities of each row, of teachers in the trainer.

    Raises:
        UnrecoverableError: a sample has no log-probabilities of a pool.
    """
    mean = {}
    for i, row in batch.rows.items():
        task = batch.train.samples[i].task
        taught = {role: teacher for role, teacher in teacher_roles(algorithm).items() if teacher.teaches(task)}
        total = sum(teacher.weight for teacher in taught.values())
        mean[i] = np.zeros(len(row.mask_L)) if taught else np.full(len(row.mask_L), np.nan)
        for role, teacher in taught.items():
            logprobs_L = in_trainer[role][i] if role in in_trainer else _of_pool(batch, i, role)
            mean[i] += teacher.weight / total * logprobs_L.astype(np.float64)
    return mean


def _of_pool(batch: Batch, i: int, role: str) -> NDArray[np.float32]:
    """Return the log-probabilities (L,) of a model of a pool that came with sample ``i``.

    Raises:
        UnrecoverableError: there are none.
    """
    if role not in batch.rows[i].models:
        sample = batch.train.samples[i].sample
        raise UnrecoverableError(f"sample {sample} has no log-probabilities of the model {role}")
    return batch.rows[i].models[role]


def _at_targets(batch: Batch, values: Mapping[int, NDArray[np.generic]]) -> list[list[Tensor]]:
    """Return values of rows (L,) as tensors (B, K), of each microbatch of each minibatch."""
    return [
        [at_targets(inputs.pieces, inputs.tokens, values, np.float32) for inputs in minibatch]
        for minibatch in batch.minibatches
    ]
