"""Log-probabilities of given tokens, and entropies, in float32, from logits or from the inputs of the output layer.

From the inputs of the output layer, logits exist for a chunk of positions at a time only, in both passes.

The entropy of a position is that of the distribution at the row's temperature, in nats. It is computed on request.

Shapes: B rows, K positions of a row, N = B·K, H features, V vocabulary, C positions of a chunk, E results of a
position: the log-probability, and the entropy on request.
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


def token_logprobs(
    logits_BKV: Tensor,
    targets_BK: Tensor,
    temperature_B: Tensor,
    chunk: int | None = None,
    entropy: bool = False,
) -> Tensor:
    """Return log softmax(logits / temperature) of the target at each position (B, K, E), in at least float32.

    Args:
        logits_BKV: logits that predict the targets, of any floating type.
        targets_BK: token ids.
        temperature_B: the temperature each row was sampled at, float32.
        chunk: positions worked on at a time; bounds the memory needed beside the logits and their gradient.
        entropy: whether to compute the entropy.
    """
    B, K, V = logits_BKV.shape
    temperature_N = temperature_B.unsqueeze(-1).expand(B, K).reshape(B * K)
    logits_NV, targets_N = logits_BKV.reshape(B * K, V), targets_BK.reshape(B * K)
    chunk = chunk or chunk_positions(V)
    return _TokenLogprobs.apply(logits_NV, targets_N, temperature_N, chunk, entropy).view(B, K, 1 + entropy)


def linear_logprobs(
    hidden_BKH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_BK: Tensor,
    temperature_B: Tensor,
    chunk: int | None = None,
    entropy: bool = False,
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
        entropy: whether to compute the entropy.
    """
    B, K, H = hidden_BKH.shape
    chunk = chunk or chunk_positions(len(weight_VH))
    if chunk >= B * K:
        return token_logprobs(linear(hidden_BKH, weight_VH, bias_V), targets_BK, temperature_B, chunk, entropy)
    temperature_N = temperature_B.unsqueeze(-1).expand(B, K).reshape(B * K)
    hidden_NH, targets_N = hidden_BKH.reshape(B * K, H), targets_BK.reshape(B * K)
    results_NE = _LinearLogprobs.apply(hidden_NH, weight_VH, bias_V, targets_N, temperature_N, chunk, entropy)
    return results_NE.view(B, K, 1 + entropy)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, targets_N: Tensor, temperature_N: Tensor, chunk: int, entropy: bool
    ) -> Tensor:
        parts = [
            _results(logits_NV[rows], targets_N[rows], temperature_N[rows], entropy)
            for rows in chunks(len(logits_NV), chunk)
        ]
        results_NE, normalizer_N = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(logits_NV, targets_N, temperature_N, normalizer_N, results_NE)
        ctx.chunk = chunk
        return results_NE

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits_NV, *saved = ctx.saved_tensors
        result_NV = torch.empty_like(logits_NV)
        for rows in chunks(len(logits_NV), ctx.chunk):
            result_NV[rows] = logits_gradient(gradients[0][rows], logits_NV[rows], *(part[rows] for part in saved))
        return result_NV, None, None, None, None


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
        entropy: bool,
    ) -> Tensor:
        parts = [
            _results(linear(hidden_NH[rows], weight_VH, bias_V), targets_N[rows], temperature_N[rows], entropy)
            for rows in chunks(len(hidden_NH), chunk)
        ]
        results_NE, normalizer_N = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, temperature_N, normalizer_N, results_NE)
        ctx.chunk = chunk
        return results_NE

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, *saved = ctx.saved_tensors
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        # Sums over chunks, at least in float32: a sum of many rounded bfloat16 terms would be inexact.
        exact = torch.promote_types(weight_VH.dtype, torch.float32)
        hidden_gradient_NH = torch.empty_like(hidden_NH) if of_hidden else None
        weight_gradient_VH = torch.zeros_like(weight_VH, dtype=exact) if of_weight else None
        bias_gradient_V = torch.zeros_like(bias_V, dtype=exact) if of_bias else None
        for rows in chunks(len(hidden_NH), ctx.chunk):
            logits = linear(hidden_NH[rows], weight_VH, bias_V)
            gradient = logits_gradient(gradients[0][rows], logits, *(part[rows] for part in saved)).to(logits.dtype)
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
        return hidden_gradient_NH, weight_gradient_VH, bias_gradient_V, None, None, None, None


def chunks(positions: int, chunk: int) -> Iterator[slice]:
    """Yield the positions in chunks; one empty chunk for no positions."""
    for start in range(0, max(1, positions), chunk):
        yield slice(start, start + chunk)


def _results(logits_CV: Tensor, targets_C: Tensor, temperature_C: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
    """Return the results (C, E) and the logarithms of the normalizers."""
    scaled_CV = logits_CV / temperature_C.unsqueeze(-1)
    normalizer_C = torch.logsumexp(scaled_CV, dim=-1)
    results = [logits_CV.gather(-1, targets_C.unsqueeze(-1)).squeeze(-1) / temperature_C - normalizer_C]
    if entropy:
        probabilities_CV = scaled_CV.sub_(normalizer_C.unsqueeze(-1)).exp_()
        results.append(torch.special.entr(probabilities_CV).sum(-1))
    return torch.stack(results, -1), normalizer_C


def logits_gradient(
    gradient_CE: Tensor,
    logits_CV: Tensor,
    targets_C: Tensor,
    temperature_C: Tensor,
    normalizer_C: Tensor,
    results_CE: Tensor,
    own_C: Tensor | None = None,
) -> Tensor:
    """Return the gradient of the logits.

    With ``own_C`` the logits are those of a part of the vocabulary; it says whether the target is in this part.

    d logprob / d logits = (onehot(target) − p) / T and d entropy / d logits = −p·(ln p + entropy) / T with
    p = softmax(logits / T).
    """
    scale_CE = gradient_CE / temperature_C.unsqueeze(-1)
    scaled_CV = logits_CV / temperature_C.unsqueeze(-1)
    probabilities_CV = scaled_CV.sub_(normalizer_C.unsqueeze(-1)).exp_()
    if results_CE.shape[-1] == 1:
        result_CV = probabilities_CV.mul_(-scale_CE)
    else:
        slope_C1 = scale_CE[:, 1:]
        result_CV = torch.special.entr(probabilities_CV).mul_(slope_C1)
        result_CV -= probabilities_CV.mul_(scale_CE[:, :1] + slope_C1 * results_CE[:, 1:])
    of_target_C1 = scale_CE[:, :1] if own_C is None else scale_CE[:, :1].where(own_C.unsqueeze(-1), 0.0)
    return result_CV.scatter_add_(-1, targets_C.unsqueeze(-1), of_target_C1)
