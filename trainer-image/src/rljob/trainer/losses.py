"""Policy loss per token, and how tokens are weighed into the loss of a batch.

Shapes: B rows of a microbatch, K positions of a row that may hold the model's tokens.
The ratio's denominator never carries a gradient, and what is clamped is what is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class Objective:
    """The objective of each token, to be maximised; its ratio, and whether a clip holds it, both without gradient."""

    values_BK: Tensor
    ratio_BK: Tensor
    clipped_BK: Tensor


def ppo_clip(
    logprobs_BK: Tensor,
    denominator_BK: Tensor,
    advantages_B: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> Objective:
    """Return the objective of each token (PPO, arXiv 1707.06347).

    min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A) with r = exp(logprob − denominator), the log-ratio clamped to
    ±20; for A < 0 and a dual clip c it is at least c·A (arXiv 1912.09729).

    Args:
        logprobs_BK: the trained policy's log-probability of each token, with gradient.
        denominator_BK: log-probability under the policy the ratio is taken against.
        advantages_B: one advantage a row.
        clip_low: ε_low.
        clip_high: ε_high.
        dual_clip: c, or None for no such bound.
    """
    advantages_B1 = advantages_B.unsqueeze(-1)
    log_ratio_BK = (logprobs_BK - denominator_BK.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_BK = log_ratio_BK.exp()
    plain_BK = ratio_BK * advantages_B1
    objective_BK = torch.minimum(plain_BK, ratio_BK.clamp(1 - clip_low, 1 + clip_high) * advantages_B1)
    if dual_clip is not None:
        bounded_BK = torch.maximum(objective_BK, dual_clip * advantages_B1)
        objective_BK = torch.where(advantages_B1 < 0, bounded_BK, objective_BK)
    return Objective(objective_BK, ratio_BK.detach(), (objective_BK != plain_BK).detach())


def token_mean(response_tokens: NDArray[np.int64], max_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the weight of each sample's tokens: one over the response tokens of all samples given."""
    return np.full(len(response_tokens), 1.0 / max(1, int(response_tokens.sum())))


def token_sum_constant(response_tokens: NDArray[np.int64], max_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the weight of each sample's tokens: one over (samples × the sample's token limit)."""
    return 1.0 / (len(max_tokens) * max_tokens.astype(np.float64))


AGGREGATIONS: dict[str, Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float64]]] = {
    "token_mean": token_mean,
    "token_sum_constant": token_sum_constant,
}
"""Value of ``algorithm.aggregation`` → weight of each sample's tokens, from the response tokens and token limits of
all samples of the global minibatch."""


def aggregation_weights(kind: str, response_tokens: Sequence[int], max_tokens: Sequence[int]) -> NDArray[np.float64]:
    """Return for each sample of a global minibatch what its tokens are multiplied with before they are summed.

    Args:
        kind: a key of ``AGGREGATIONS``.
        response_tokens: tokens the model wrote, of each sample.
        max_tokens: the sample's task's ``maxTokens``.
    """
    return AGGREGATIONS[kind](np.asarray(response_tokens, dtype=np.int64), np.asarray(max_tokens, dtype=np.int64))


def masked_sum(values_BK: Tensor, mask_BK: Tensor, weights_B: Tensor) -> Tensor:
    """Return the sum of the values where the mask is set, each times its row's weight."""
    zero = torch.zeros((), dtype=values_BK.dtype, device=values_BK.device)
    return (torch.where(mask_BK, values_BK, zero) * weights_B.unsqueeze(-1)).sum()
