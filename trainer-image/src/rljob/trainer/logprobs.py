"""Log-probabilities of given tokens, in float32, from logits or from the inputs of the output layer.

From the inputs of the output layer, logits exist for a chunk of positions at a time only, in both passes.

Shapes: B rows, K positions of a row, N = B·K, H features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

CHUNK_BYTES = 1 << 28  # of float32 logits; temporary tensors take about three times as much


def chunk_positions(vocabulary: int) -> int:
    """Return the number of positions of a chunk."""
    return max(1, CHUNK_BYTES // (4 * vocabulary))


def token_logprobs(logits_BKV: Tensor, targets_BK: Tensor, temperature_B: Tensor, chunk: int | None = None) -> Tensor:
    """Return log softmax(logits / temperature) of the target at each position, in at least float32.

    Args:
        logits_BKV: logits that predict the targets, of any floating type.
        targets_BK: token ids.
        temperature_B: the temperature each row was sampled at, float32.
        chunk: positions worked on at a time; bounds the memory needed beside the logits and their gradient.
    """
    B, K, V = logits_BKV.shape
    temperature_N = temperature_B.unsqueeze(-1).expand(B, K).reshape(B * K)
    logits_NV, targets_N = logits_BKV.reshape(B * K, V), targets_BK.reshape(B * K)
    return _TokenLogprobs.apply(logits_NV, targets_N, temperature_N, chunk or chunk_positions(V)).view(B, K)


def linear_logprobs(
    hidden_BKH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_BK: Tensor,
    temperature_B: Tensor,
    chunk: int | None = None,
) -> Tensor:
    """Return :func:`token_logprobs` of the logits ``linear(hidden, weight, bias)``, which are never all in memory.

    The backward pass computes the logits of a chunk again. If all positions fit one chunk, their logits are kept.

    Args:
        hidden_BKH: inputs of the output layer.
        weight_VH: its weight, of the type of ``hidden_BKH``.
        bias_V: its bias.
        targets_BK: token ids.
        temperature_B: the temperature each row was sampled at, float32.
        chunk: positions worked on at a time.
    """
    B, K, H = hidden_BKH.shape
    chunk = chunk or chunk_positions(len(weight_VH))
    if chunk >= B * K:
        return token_logprobs(linear(hidden_BKH, weight_VH, bias_V), targets_BK, temperature_B, chunk)
    temperature_N = temperature_B.unsqueeze(-1).expand(B, K).reshape(B * K)
    hidden_NH, targets_N = hidden_BKH.reshape(B * K, H), targets_BK.reshape(B * K)
    return _LinearLogprobs.apply(hidden_NH, weight_VH, bias_V, targets_N, temperature_N, chunk).view(B, K)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, temperature_N: Tensor, chunk: int) -> Tensor:
        parts = [
            _logprobs(logits_NV[rows], targets_N[rows], temperature_N[rows]) for rows in _chunks(len(logits_NV), chunk)
        ]
        logprobs_N, normalizer_N = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(logits_NV, targets_N, temperature_N, normalizer_N)
        ctx.chunk = chunk
        return logprobs_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        logits_NV, targets_N, temperature_N, normalizer_N = ctx.saved_tensors
        result_NV = torch.empty_like(logits_NV)
        for rows in _chunks(len(logits_NV), ctx.chunk):
            result_NV[rows] = _logits_gradient(
                gradients[0][rows], logits_NV[rows], targets_N[rows], temperature_N[rows], normalizer_N[rows]
            )
        return result_NV, None, None, None


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        temperature_N: Tensor,
        chunk: int,
    ) -> Tensor:
        parts = [
            _logprobs(linear(hidden_NH[rows], weight_VH, bias_V), targets_N[rows], temperature_N[rows])
            for rows in _chunks(len(hidden_NH), chunk)
        ]
        logprobs_N, normalizer_N = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, temperature_N, normalizer_N)
        ctx.chunk = chunk
        return logprobs_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, temperature_N, normalizer_N = ctx.saved_tensors
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        # Sums over chunks, at least in float32: a sum of many rounded bfloat16 terms would be inexact.
        exact = torch.promote_types(weight_VH.dtype, torch.float32)
        hidden_gradient_NH = torch.empty_like(hidden_NH) if of_hidden else None
        weight_gradient_VH = torch.zeros_like(weight_VH, dtype=exact) if of_weight else None
        bias_gradient_V = torch.zeros_like(bias_V, dtype=exact) if of_bias else None
        for rows in _chunks(len(hidden_NH), ctx.chunk):
            logits = linear(hidden_NH[rows], weight_VH, bias_V)
            gradient = _logits_gradient(
                gradients[0][rows], logits, targets_N[rows], temperature_N[rows], normalizer_N[rows]
            ).to(logits.dtype)
            if hidden_gradient_NH is not None:
                hidden_gradient_NH[rows] = gradient @ weight_VH
            if weight_gradient_VH is not None:
                weight_gradient_VH += gradient.t() @ hidden_NH[rows]
            if bias_gradient_V is not None:
                bias_gradient_V += gradient.sum(0, dtype=exact)
        if weight_gradient_VH is not None:
            weight_gradient_VH = weight_gradient_VH.to(weight_VH.dtype)
        if bias_gradient_V is not None:
            bias_gradient_V = bias_gradient_V.to(weight_VH.dtype)
        return hidden_gradient_NH, weight_gradient_VH, bias_gradient_V, None, None, None


def _chunks(positions: int, chunk: int) -> Iterator[slice]:
    for start in range(0, max(1, positions), chunk):  # one empty chunk for no positions
        yield slice(start, start + chunk)


def _logprobs(logits_CV: Tensor, targets_C: Tensor, temperature_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of the targets and the logarithms of the normalizers."""
    normalizer_C = torch.logsumexp(logits_CV / temperature_C.unsqueeze(-1), dim=-1)
    return logits_CV.gather(-1, targets_C.unsqueeze(-1)).squeeze(-1) / temperature_C - normalizer_C, normalizer_C


def _logits_gradient(
    gradient_C: Tensor, logits_CV: Tensor, targets_C: Tensor, temperature_C: Tensor, normalizer_C: Tensor
) -> Tensor:
    """Return the gradient of the logits: d logprob / d logits = (onehot(target) − softmax(logits / T)) / T."""
    scale_C1 = (gradient_C / temperature_C).unsqueeze(-1)
    scaled = logits_CV / temperature_C.unsqueeze(-1)
    result_CV = scaled.sub_(normalizer_C.unsqueeze(-1)).exp_().mul_(-scale_C1)
    return result_CV.scatter_add_(-1, targets_C.unsqueeze(-1), scale_C1)
