"""Layouts of a microbatch for a pipeline stage: rows padded to one length, parts of padded rows, or packed rows.

With sequence parallelism each tensor-parallel rank has a part of the positions between the layers, so their number is a
multiple of the tensor-parallel size.

Shapes: B rows, S positions of this rank, K targets of a row, k targets of this rank, E results of a target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rljob.trainer.backends.fsdp.packed_rows import packed
from rljob.trainer.backends.megatron.context_parallel import gather_targets, own_positions
from rljob.trainer.backends.megatron.megatron_library import PackedSeqParams
from rljob.trainer.backends.megatron.process_grid import ProcessGrid
from rljob.trainer.batch import Microbatch


@dataclass(frozen=True)
class StageInputs:
    """A microbatch as the stages of a replica get it. Packed rows follow each other in one row, and their targets have
    the shape (N, 1)."""

    token_ids: Tensor  # (B, S)
    rows: PackedSeqParams | None  # bounds of packed rows
    keep: Tensor  # positions of the last stage whose results are needed
    targets: Tensor  # (B, k)
    temperature: Tensor  # of the rows of ``targets``
    placed: Callable[[Tensor], Tensor]  # results (B, k, E) → (B, K, E)


Layout: TypeAlias = Callable[[Microbatch, ProcessGrid], StageInputs]


def padded_rows(microbatch: Microbatch, grid: ProcessGrid) -> StageInputs:
    """Return rows with padding on the right, which the causal mask hides."""
    token_ids_BS = _filled(microbatch.token_ids_BL, grid.tensor_size)
    return StageInputs(
        token_ids_BS,
        None,
        microbatch.keep_K,
        microbatch.targets_BK,
        microbatch.temperature_B,
        lambda results_BKE: results_BKE,
    )


def row_parts(microbatch: Microbatch, grid: ProcessGrid) -> StageInputs:
    """Return this context-parallel rank's parts of padded rows; all ranks get the results of all targets."""
    token_ids_BL = _filled(microbatch.token_ids_BL, 2 * grid.context_size * grid.tensor_size)
    positions_S = own_positions(token_ids_BL.shape[1], grid.context_rank, grid.context_size)
    targets = microbatch.targets_BK.shape[1]
    number_S = positions_S + 1 - microbatch.first  # of the target that a position predicts
    keep = np.flatnonzero((number_S >= 0) & (number_S < targets))
    found = len(keep)
    keep = keep if found else np.zeros(1, np.int64)  # a rank without targets computes one, which is not used
    device = token_ids_BL.device
    own_k = torch.from_numpy(number_S[keep] if found else keep).to(device)

    def placed(results_BkE: Tensor) -> Tensor:
        return gather_targets(results_BkE[:, :found], own_k[:found], targets, grid.context_group)

    return StageInputs(
        token_ids_BL[:, torch.from_numpy(positions_S).to(device)],
        None,
        torch.from_numpy(keep).to(device),
        microbatch.targets_BK[:, own_k],
        microbatch.temperature_B,
        placed,
    )


def packed_rows(microbatch: Microbatch, grid: ProcessGrid) -> StageInputs:
    """Return the rows one after the other in one row, without padding; missing positions are a row of their own."""
    inputs = packed(microbatch)
    bounds, longest = inputs.arguments["cu_seq_lens_q"], inputs.arguments["max_length_q"]
    token_ids_1T = inputs.arguments["input_ids"]
    filled_1S = _filled(token_ids_1T, grid.tensor_size)
    if (size := filled_1S.shape[1]) > token_ids_1T.shape[1]:
        bounds = torch.cat([bounds, bounds.new_full((1,), size)])
        longest = max(longest, size - token_ids_1T.shape[1])
    rows = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=longest, max_seqlen_kv=longest)
    return StageInputs(
        filled_1S, rows, inputs.arguments["logits_to_keep"], inputs.targets, inputs.temperature, inputs.placed
    )


def _filled(token_ids_BL: Tensor, multiple: int) -> Tensor:
    """Return the rows with padding up to a multiple of positions."""
    missing = -token_ids_BL.shape[1] % multiple
    return pad(token_ids_BL, (0, missing)) if missing else token_ids_BL
