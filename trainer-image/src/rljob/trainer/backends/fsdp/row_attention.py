"""Attention of packed rows: the rows of a microbatch follow each other in one sequence, and a token sees only its row.

On a GPU with flash attention one kernel computes all rows (torch's ``varlen_attn``); elsewhere each row is computed by
itself, which is as exact as a padded row.

Importing this module registers the attention with transformers under the name :data:`PACKED`.

Shapes: T tokens of all rows, H heads, D size of a head, L tokens of a row.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

log = logging.getLogger(__name__)

PACKED, PADDED = "rljob_packed", "sdpa"
"""Names of the attention in transformers, for packed and for padded rows."""
AMPERE = (8, 0)
"""First compute capability of flash attention."""
LARGEST_HEAD = 256


@functools.cache
def has_kernel(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Return whether one kernel computes all rows. It is tried, in both passes, because PyTorch may be built without
    it."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and head_size % 8 == 0
        and head_size <= LARGEST_HEAD
        and torch.cuda.get_device_capability(device) >= AMPERE
        and _runs(device, dtype, head_size)
    )


def _runs(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    tokens_2HD = torch.zeros(2, 1, head_size, device=device, dtype=dtype, requires_grad=True)
    starts = torch.tensor([0, 1, 2], device=device, dtype=torch.int32)
    try:
        with torch.enable_grad():
            result = varlen_attn(tokens_2HD, tokens_2HD, tokens_2HD, starts, starts, 1, 1, window_size=(-1, 0))
            assert isinstance(result, Tensor)  # a tuple only on request
            result.sum().backward()
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        log.warning("PyTorch's attention of variable length cannot be used: %s", error)
        return False
    return True


def packed_attention(
    module: torch.nn.Module,
    query_1HTD: Tensor,
    key_1HTD: Tensor,
    value_1HTD: Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_others: Any,
) -> tuple[Tensor, None]:
    """Return the results (1, T, H, D) for packed rows; called by the attention modules of transformers.

    Args:
        module: the attention module.
        query_1HTD: of all rows; key and value may have fewer heads.
        key_1HTD: see ``query_1HTD``.
        value_1HTD: see ``query_1HTD``.
        attention_mask: None.
        cu_seq_lens_q: first token of each row, and T; int32.
        max_length_q: tokens of the longest row.
        scaling: of query · key.
        sliding_window: tokens that a token sees, itself included; None: all before it.
        _others: further arguments of transformers; :mod:`rljob.trainer.backends.fsdp.packing` knows those that matter.
    """
    if has_kernel(query_1HTD.device, query_1HTD.dtype, query_1HTD.shape[-1]):
        query_THD, key_THD, value_THD = (part[0].transpose(0, 1) for part in (query_1HTD, key_1HTD, value_1HTD))
        result_THD = variable_length_attention(
            query_THD, key_THD, value_THD, cu_seq_lens_q, max_length_q, scaling, sliding_window
        )
        return result_THD.unsqueeze(0), None
    lengths = cu_seq_lens_q.diff().tolist()
    rows = zip(*(part.split(lengths, dim=2) for part in (query_1HTD, key_1HTD, value_1HTD)), strict=True)
    results = [
        sdpa_attention_forward(module, query, key, value, _window_mask(query, sliding_window), scaling=scaling)[0]
        for query, key, value in rows
    ]
    return torch.cat(results, dim=1), None


def variable_length_attention(
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    bounds: Tensor,
    longest: int,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Return the results (T, H, D) of packed rows by the kernel, where :func:`has_kernel` says that there is one.

    Args:
        query_THD: of all rows; key and value may have fewer heads.
        key_THD: see ``query_THD``.
        value_THD: see ``query_THD``.
        bounds: first token of each row, and T; int32.
        longest: tokens of the longest row.
        scale: of query · key.
        window: tokens that a token sees, itself included; None: all before it.
    """
    result_THD = varlen_attn(
        query_THD,
        key_THD,
        value_THD,
        bounds,
        bounds,
        longest,
        longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=True,
    )
    assert isinstance(result_THD, Tensor)  # a tuple only on request
    return result_THD


def _window_mask(query_1HLD: Tensor, window: int | None) -> Tensor | None:
    """Return which tokens (query, key) of a row see each other; None: each sees all before it."""
    length = query_1HLD.shape[2]
    if window is None or length <= window:
        return None
    position = torch.arange(length, device=query_1HLD.device)
    distance_LL = position.unsqueeze(1) - position
    return ((distance_LL >= 0) & (distance_LL < window))[None, None]


ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)
