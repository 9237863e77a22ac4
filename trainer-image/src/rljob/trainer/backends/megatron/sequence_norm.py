"""The RMS norm of Megatron-Core's layers, by PyTorch. The library's own refuses sequence parallelism."""

from __future__ import annotations

from typing import Any

from torch import nn

from rljob.trainer.backends.megatron.megatron_library import TransformerConfig


class SequenceNorm(nn.RMSNorm):
    """An RMS norm whose weight has the mark with which the library sums its gradient over tensor-parallel ranks: with
    sequence parallelism each of them has the gradient of its positions.

    Args:
        config: of the model.
        hidden_size: number of features.
        eps: added to the mean square.
        other: further arguments of the library's constructors.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **other: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
