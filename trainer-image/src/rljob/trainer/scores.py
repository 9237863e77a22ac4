"""Scores: results of forward passes over a batch before its first update, computed if the algorithm needs them.

Shapes: B rows of a microbatch, K positions of a row that may hold the model's tokens, L tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rljob.api.algorithm import Algorithm
from rljob.trainer.algorithms.needs import load_function, needs, needs_of
from rljob.trainer.backends.base import Backend
from rljob.trainer.batch import Batch


@dataclass(frozen=True)
class Scores:
    """Scores of this replica's samples."""

    batch: Batch
    old: Sequence[list[Tensor] | None]
    """Log-probabilities (B, K) under the weights before the batch, of each microbatch of each minibatch; None for a
    minibatch that does not need them, or for which the first forward pass of its update computes them."""

    def old_by_row(self) -> dict[int, NDArray[np.float32]]:
        """Return the log-probabilities (L,) before the batch by index in the batch; 0 except at the model's tokens.

        Raises:
            ValueError: the log-probabilities were not computed.
        """
        result = {}
        for minibatch, outputs in zip(self.batch.minibatches, self.old, strict=True):
            if outputs is None:
                raise ValueError("there are no old log-probabilities; declare @requires(old=True)")
            for inputs, old_BK in zip(minibatch, outputs, strict=True):
                values_BK = old_BK.float().cpu().numpy()
                for b, i in enumerate(inputs.indices):
                    mask_L, first = self.batch.rows[i].mask_L, inputs.tokens.first
                    values_L = np.zeros(len(mask_L), np.float32)
                    values_L[first:] = values_BK[b, : len(mask_L) - first]
                    result[i] = np.where(mask_L, values_L, np.float32(0))
        return result


def score(batch: Batch, backend: Backend, algorithm: Algorithm) -> Scores:
    """Return the scores that the algorithm needs, from forward passes of the microbatches.

    An advantage that needs the old log-probabilities needs all of them. A loss that needs them does not need those of
    the first minibatch: its own forward pass runs before the first update, so it computes the same numbers.

    Args:
        batch: with rows and microbatches of this replica.
        backend: the policy.
        algorithm: resolved.

    Raises:
        ValueError: no backend computes a need.
    """
    if missing := needs(algorithm).unsupported():
        raise ValueError(f"no backend computes what the algorithm needs: {', '.join(missing)}")
    everywhere = needs_of(load_function(algorithm, "advantage")).old
    later = needs(algorithm).old
    old: list[list[Tensor] | None] = []
    for number, minibatch in enumerate(batch.minibatches):
        if everywhere or (later and number > 0):
            outputs = backend.run([inputs.tokens for inputs in minibatch], None)
            old.append([output.logprobs_BK for output in outputs])
        else:
            old.append(None)
    return Scores(batch, old)
