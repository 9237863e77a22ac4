"""Layouts of a microbatch for a model: rows padded to one length, or packed into one sequence without padding.

Results of packed rows are placed where those of padded rows are, so that losses do not depend on the layout.

Shapes: B rows, L positions, K targets of a row, T tokens of all rows, N targets of all rows without padding, H
features, E results of a target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rljob.trainer.batch import Microbatch


@dataclass(frozen=True)
class ModelInputs:
    """A microbatch as a model gets it. Targets have the shape (B, K), or (N, 1) if they are packed."""

    arguments: dict[str, Any]
    """Of the model's forward."""
    targets: Tensor
    temperature: Tensor
    """Of the rows of ``targets``."""
    placed: Callable[[Tensor], Tensor]
    """Results (B, K, E) or (N, 1, E) → (B, K, E), with zeros where a row has padding."""


def padded(microbatch: Microbatch) -> ModelInputs:
    """Return the microbatch with padding on the right, which the causal mask hides."""
    arguments = {"input_ids": microbatch.token_ids_BL, "logits_to_keep": microbatch.keep_K}
    return ModelInputs(arguments, microbatch.targets_BK, microbatch.temperature_B, lambda results_BKE: results_BKE)


def packed(microbatch: Microbatch) -> ModelInputs:
    """Return the microbatch without padding, for :mod:`rljob.trainer.backends.fsdp.row_attention`."""
    rows, targets = microbatch.targets_BK.shape
    length, device = microbatch.token_ids_BL.shape[1], microbatch.token_ids_BL.device
    lengths_B = np.asarray(microbatch.lengths)
    starts_B = np.cumsum(lengths_B) - lengths_B
    kept_B = np.maximum(lengths_B - microbatch.first, 0)

    def indices(values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(device)

    position_T = _ranges(lengths_B)
    target_N = _ranges(kept_B)  # number of the target in its row
    # from (row, position in the row) to the index in a padded tensor and in the packed sequence
    padded_T = indices(np.repeat(np.arange(rows) * length, lengths_B) + position_T)
    padded_N = indices(np.repeat(np.arange(rows) * targets, kept_B) + target_N)
    kept_N = indices(np.repeat(starts_B + microbatch.first - 1, kept_B) + target_N)
    bounds = torch.from_numpy(np.append(starts_B, lengths_B.sum()).astype(np.int32)).to(device)
    longest = int(lengths_B.max())

    def placed(results_N1E: Tensor) -> Tensor:
        results_NE = results_N1E.squeeze(1)
        all_E = results_NE.new_zeros(rows * targets, results_NE.shape[-1])
        return all_E.index_copy(0, padded_N, results_NE).view(rows, targets, -1)

    return ModelInputs(
        arguments={
            "input_ids": microbatch.token_ids_BL.reshape(-1)[padded_T].unsqueeze(0),
            "position_ids": indices(position_T).unsqueeze(0),
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": longest,
            "max_length_k": longest,
            "logits_to_keep": kept_N,
        },
        targets=microbatch.targets_BK.reshape(-1)[padded_N].unsqueeze(-1),
        temperature=microbatch.temperature_B.repeat_interleave(
            indices(kept_B), output_size=len(target_N)
        ),  # on the device without a copy to the host
        placed=placed,
    )


def _ranges(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 0 … size − 1 of each size, one after the other."""
    return np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
