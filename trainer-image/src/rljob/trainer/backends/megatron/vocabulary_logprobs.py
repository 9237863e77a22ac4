"""Log-probabilities of given tokens, and entropies, from logits whose vocabulary is split over tensor-parallel ranks.

Every rank gets the results of the whole vocabulary, and passes back the gradient of its own logits without another
exchange. The library's cross entropy counts the columns that pad the vocabulary, and changes its input.

Shapes: as in :mod:`rljob.trainer.logprobs`; V is the part of the vocabulary of this rank, padding included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rljob.trainer.logprobs import chunk_positions, chunks, logits_gradient


@dataclass(frozen=True)
class VocabularyPart:
    """The token ids ``first`` to ``first + count`` of this rank, and the ranks that hold the others."""

    first: int
    count: int  # without padding; possibly 0
    ranks: dist.ProcessGroup

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks."""
        dist.all_reduce(values, group=self.ranks)
        return values

    def max(self, values: Tensor) -> Tensor:
        """Return the largest values over the ranks."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.ranks)
        return values


def split_token_logprobs(
    logits_BKV: Tensor,
    targets_BK: Tensor,
    temperature_B: Tensor,
    part: VocabularyPart,
    chunk: int | None = None,
    entropy: bool = False,
) -> Tensor:
    """Return log softmax(logits / temperature) of the target at each position (B, K, E), in at least float32.

    Args:
        logits_BKV: of this rank's part of the vocabulary.
        targets_BK: token ids of the whole vocabulary.
        temperature_B: the temperature each row was sampled at, float32.
        part: this rank's part.
        chunk: positions worked on at a time; bounds the memory needed beside the logits and their gradient.
        entropy: whether to compute the entropy.
    """
    B, K, V = logits_BKV.shape
    temperature_N = temperature_B.unsqueeze(-1).expand(B, K).reshape(B * K)
    logits_NV, targets_N = logits_BKV.reshape(B * K, V), targets_BK.reshape(B * K)
    chunk = chunk or chunk_positions(V)
    return _SplitLogprobs.apply(logits_NV, targets_N, temperature_N, part, chunk, entropy).view(B, K, 1 + entropy)


class _SplitLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Tensor,
        targets_N: Tensor,
        temperature_N: Tensor,
        part: VocabularyPart,
        chunk: int,
        entropy: bool,
    ) -> Tensor:
        targets_N = targets_N - part.first
        own_N = (targets_N >= 0) & (targets_N < part.count)
        targets_N = targets_N.where(own_N, 0)
        largest_N = part.max(_largest(logits_NV[:, : part.count], temperature_N, chunk))
        sums = [
            _sums(logits_NV[rows, : part.count], temperature_N[rows], largest_N[rows], entropy)
            for rows in chunks(len(logits_NV), chunk)
        ]
        # A rank without token ids has no column for the targets of others.
        target_N = (logits_NV.gather(-1, targets_N.unsqueeze(-1)).squeeze(-1) / temperature_N).where(own_N, 0.0)
        total_XN = part.sum(torch.stack([*(torch.cat(kind) for kind in zip(*sums, strict=True)), target_N]))
        logarithm_N = total_XN[0].log()
        normalizer_N = largest_N + logarithm_N
        results = [total_XN[-1] - normalizer_N]
        if entropy:
            results.append(logarithm_N - total_XN[1] / total_XN[0])
        results_NE = torch.stack(results, -1)
        ctx.save_for_backward(logits_NV, targets_N, temperature_N, normalizer_N, results_NE, own_N)
        ctx.count, ctx.chunk = part.count, chunk
        return results_NE

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits_NV, *saved = ctx.saved_tensors
        result_NV = torch.zeros_like(logits_NV)  # of padding: 0
        for rows in chunks(len(logits_NV), ctx.chunk):
            if ctx.count:
                logits_CV = logits_NV[rows, : ctx.count]
                result_NV[rows, : ctx.count] = logits_gradient(
                    gradients[0][rows], logits_CV, *(tensor[rows] for tensor in saved)
                )
        return result_NV, None, None, None, None, None


def _largest(logits_NV: Tensor, temperature_N: Tensor, chunk: int) -> Tensor:
    """Return the largest scaled logit of each position (N,); -inf without token ids."""
    if not logits_NV.shape[1]:
        return torch.full_like(temperature_N, -torch.inf)
    return torch.cat([logits_NV[rows].amax(-1) / temperature_N[rows] for rows in chunks(len(logits_NV), chunk)])


def _sums(logits_CV: Tensor, temperature_C: Tensor, largest_C: Tensor, entropy: bool) -> tuple[Tensor, ...]:
    """Return the sum of exp(x) over this rank's token ids, and on request of exp(x)·x; x is relative to the largest."""
    scaled_CV = (logits_CV / temperature_C.unsqueeze(-1)).sub_(largest_C.unsqueeze(-1))
    weights_CV = scaled_CV.exp()
    normalizer_C = weights_CV.sum(-1)
    return (normalizer_C, (weights_CV * scaled_CV).sum(-1)) if entropy else (normalizer_C,)
