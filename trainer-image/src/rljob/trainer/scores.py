"""Scores: results of forward passes over a batch before its first update, computed if the algorithm needs them.

Shapes: B rows of a microbatch, K positions of a row that may hold the model's tokens, L tokens of a sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rljob.trainer.algorithms.needs import Needs
from rljob.trainer.backends.base import Backend
from rljob.trainer.batch import Batch


@dataclass(frozen=True)
class Scores:
    """Scores of this replica's samples."""

    batch: Batch
    old: list[list[Tensor]] | None = None
    """Log-probabilities (B, K) under the weights before the batch, of each microbatch of each minibatch."""

    def old_by_row(self) -> dict[int, NDArray[np.float32]]:
        """Return the log-probabilities (L,) before the batch by index in the batch; 0 except at the model's tokens.

        Raises:
            ValueError: the log-probabilities were not computed.
        """
        if self.old is None:
            raise ValueError("there are no old log-probabilities; declare @requires(old=True)")
        result = {}
        for minibatch, outputs in zip(self.batch.minibatches, self.old, strict=True):
            for inputs, old_BK in zip(minibatch, outputs, strict=True):
                values_BK = old_BK.float().cpu().numpy()
                for b, i in enumerate(inputs.indices):
                    mask_L, first = self.batch.rows[i].mask_L, inputs.tokens.first
                    values_L = np.zeros(len(mask_L), np.float32)
                    values_L[first:] = values_BK[b, : len(mask_L) - first]
                    result[i] = np.where(mask_L, values_L, np.float32(0))
        return result


def score(batch: Batch, backend: Backend, needs: Needs) -> Scores:
    """Return the scores that are needed, from forward passes of all microbatches.

    With several minibatches the old log-probabilities are computed too, because the first update changes the weights
    that they belong to. With one minibatch the objective takes them from its own forward pass.

    Args:
        batch: with rows and microbatches of this replica.
        backend: the policy.
        needs: union over the algorithm's functions.

    Raises:
        ValueError: no backend computes a need.
    """
    if missing := needs.unsupported():
        raise ValueError(f"no backend computes what the algorithm needs: {', '.join(missing)}")
    if not needs.old and len(batch.minibatches) == 1:
        return Scores(batch)
    old = []
    for minibatch in batch.minibatches:
        outputs = backend.run([inputs.tokens for inputs in minibatch], None)
        old.append([output.logprobs_BK for output in outputs])
    return Scores(batch, old)
