"""Core attention of Megatron-Core by PyTorch's scaled dot product attention, which is flash attention on GPUs.

The library's own needs Transformer Engine, or holds all scores in memory.

Shapes: S positions, B rows, D elements of a head.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class SdpaAttention(nn.Module):
    """Causal attention over rows that are padded on the right: no token attends to padding.

    Args:
        softmax_scale: factor of the scores. Default: 1 / √D.
        other: further arguments of the library's constructors: its configuration, the number of the layer, groups.
    """

    def __init__(self, softmax_scale: float | None = None, **other: Any) -> None:
        super().__init__()
        self._scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **other: Any) -> Tensor:
        """Return the results of all heads of this rank (S, B, heads * D).

        Args:
            query: (S, B, heads, D).
            key: (S, B, groups, D); each is used by heads / groups heads.
            value: like ``key``.
            attention_mask: None.
            other: further arguments of the library: the kind of mask, and None for bias and packing.
        """
        of_query, of_key, of_value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        grouped = query.shape[2] != key.shape[2]
        result = scaled_dot_product_attention(
            of_query, of_key, of_value, is_causal=True, scale=self._scale, enable_gqa=grouped
        )
        return result.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)
