"""Context parallelism: each rank has two parts of every row, one from its begin and one from its end.

A row has 2 C parts for C ranks; rank r has the parts r and 2 C − 1 − r, so that all ranks attend to equally many
tokens. This is the order of Megatron-Core, whose rotary embeddings follow it.

Shapes: B rows, K targets of a row, k those of this rank, E results of a target, S positions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor


def own_positions(length: int, rank: int, ranks: int) -> NDArray[np.int64]:
    """Return the positions of a rank in rows of ``length``, a multiple of 2 × ``ranks``."""
    parts_PS = np.arange(length).reshape(2 * ranks, -1)
    return np.concatenate([parts_PS[rank], parts_PS[2 * ranks - 1 - rank]])


def natural_order(gathered: Tensor, ranks: int) -> Tensor:
    """Return positions (S, …) of all ranks, which follow each other by rank, in the order of the row."""
    parts = gathered.unflatten(0, (2 * ranks, -1))
    order = [2 * part if part < ranks else 2 * (2 * ranks - 1 - part) + 1 for part in range(2 * ranks)]
    return parts[order].flatten(0, 1)


def gather_targets(results_BkE: Tensor, own_k: Tensor, targets: int, group: dist.ProcessGroup) -> Tensor:
    """Return the results (B, K, E) of the targets of all ranks on every rank; each passes the gradient of its own back.

    Args:
        results_BkE: of this rank's targets.
        own_k: their numbers in the row.
        targets: number of targets of a row, K.
        group: the context-parallel ranks.
    """
    gathered: Tensor = _GatherTargets.apply(results_BkE, own_k, targets, group)
    return gathered


class _GatherTargets(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, results_BkE: Tensor, own_k: Tensor, targets: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(own_k)
        rows, _, kinds = results_BkE.shape
        all_BKE = results_BkE.new_zeros(rows, targets, kinds)
        all_BKE[:, own_k] = results_BkE
        dist.all_reduce(all_BKE, group=group)
        return all_BKE

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (own_k,) = ctx.saved_tensors
        return gradients[0][:, own_k], None, None, None
