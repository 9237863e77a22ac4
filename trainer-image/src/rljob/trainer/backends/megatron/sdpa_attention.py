"""Core attention of Megatron-Core by PyTorch's scaled dot product attention, which is flash attention on GPUs.

The library's own needs Transformer Engine, or holds all scores in memory, and computes neither packed rows nor parts of
rows.

Shapes: S positions of this rank, T tokens of packed rows, B rows, D elements of a head, C context-parallel ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from rljob.trainer.backends.fsdp.row_attention import has_kernel, variable_length_attention
from rljob.trainer.backends.megatron.context_parallel import natural_order
from rljob.trainer.backends.megatron.megatron_library import (
    PackedSeqParams,
    TransformerConfig,
    gather_from_sequence_parallel_region,
    parallel_state,
)


class SdpaAttention(nn.Module):
    """Causal attention over rows that are padded on the right, or packed: no token attends to padding.

    Args:
        config: of the model.
        softmax_scale: factor of the scores. Default: 1 / √D.
        other: further arguments of the library's constructors: the number of the layer, groups.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **other: Any) -> None:
        super().__init__()
        self._scale = softmax_scale
        self._context = parallel_state.get_context_parallel_group() if config.context_parallel_size > 1 else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedSeqParams | None = None,
        **other: Any,
    ) -> Tensor:
        """Return the results of all heads of this rank, (S, B, heads * D) or (T, heads * D).

        Args:
            query: (S, B, heads, D); of packed rows (T, heads, D).
            key: (S, B, groups, D), of packed rows without B; each is used by heads / groups heads.
            value: like ``key``.
            attention_mask: None.
            packed_seq_params: bounds of packed rows.
            other: further arguments of the library: the kind of mask, and None for a bias.
        """
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params).flatten(1)
        if self._context is not None:
            return self._of_parts(query, key, value, self._context).flatten(2)
        return self._attend(query, key, value, is_causal=True).flatten(2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, **mask: Any) -> Tensor:
        """Return the results (S, B, heads, D)."""
        of_query, of_key, of_value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        grouped = query.shape[2] != key.shape[2]
        result = scaled_dot_product_attention(of_query, of_key, of_value, scale=self._scale, enable_gqa=grouped, **mask)
        return result.permute(2, 0, 1, 3)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, rows: PackedSeqParams) -> Tensor:
        """Return the results (T, heads, D), by one kernel where there is one, else row by row."""
        if has_kernel(query.device, query.dtype, query.shape[-1]):
            longest: int = rows.max_seqlen_q
            return variable_length_attention(query, key, value, rows.cu_seqlens_q, longest, self._scale)
        lengths = rows.cu_seqlens_q.diff().tolist()
        parts = zip(*(tensor.unsqueeze(1).split(lengths) for tensor in (query, key, value)), strict=True)
        return torch.cat([self._attend(*row, is_causal=True) for row in parts]).squeeze(1)

    def _of_parts(self, query: Tensor, key: Tensor, value: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
        """Return the results of this rank's two parts of each row; keys and values of all parts are gathered."""
        gathered = gather_from_sequence_parallel_region(torch.stack([key, value], 1), group=group)
        keys, values = natural_order(gathered, group.size()).unbind(1)
        half = len(query) // 2
        results = []
        for number, part in zip((group.rank(), 2 * group.size() - 1 - group.rank()), query.split(half), strict=True):
            seen = (number + 1) * half
            mask = {"is_causal": True} if seen == half else {"attn_mask": causal_lower_right(half, seen)}
            results.append(self._attend(part, keys[:seen], values[:seen], **mask))
        return torch.cat(results)
