"""Log-probabilities of given tokens, in float32 and without float32 copies of all logits.

Shapes: B rows, K positions of a row, N = B·K, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_POSITIONS = 4096


def token_logprobs(
    logits_BKV: Tensor, targets_BK: Tensor, temperature_B: Tensor, chunk: int = CHUNK_POSITIONS
) -> Tensor:
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
    return _TokenLogprobs.apply(logits_NV, targets_N, temperature_N, chunk).view(B, K)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, temperature_N: Tensor, chunk: int) -> Tensor:
        scaled = [
            torch.logsumexp(logits / temperature.unsqueeze(-1), dim=-1)
            for logits, temperature in zip(logits_NV.split(chunk), temperature_N.split(chunk), strict=True)
        ]
        normalizer_N = torch.cat(scaled)
        ctx.save_for_backward(logits_NV, targets_N, temperature_N, normalizer_N)
        ctx.chunk = chunk
        return logits_NV.gather(-1, targets_N.unsqueeze(-1)).squeeze(-1) / temperature_N - normalizer_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """d logprob / d logits = (onehot(target) − softmax(logits / T)) / T."""
        logits_NV, targets_N, temperature_N, normalizer_N = ctx.saved_tensors
        scale_N1 = (gradients[0] / temperature_N).unsqueeze(-1)
        result_NV = torch.empty_like(logits_NV)
        for start in range(0, len(logits_NV), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            scaled = logits_NV[rows] / temperature_N[rows].unsqueeze(-1)
            gradient = scaled.sub_(normalizer_N[rows].unsqueeze(-1)).exp_().mul_(-scale_N1[rows])
            result_NV[rows] = gradient.scatter_add_(-1, targets_N[rows].unsqueeze(-1), scale_N1[rows])
        return result_NV, None, None, None
