"""Estimates of a KL divergence at a token, from its log-probabilities under two policies.

``spec.algorithm.klEstimator`` names a built-in function or ``module:function`` of a user's package. It gets the
log-probabilities of the policy, with gradient if the term is in the loss, and those of the reference model, and returns
the estimate of each token. Outside the mask both are 0; values there are ignored.

In expectation over tokens that the policy π itself samples, k1, k3 and k3_unbiased are KL(π‖reference), and k2 is near
it for near policies. As a loss their gradients differ: that of k1 is 0, that of k2 and of k3_unbiased is the gradient
of KL(π‖reference), that of k3 is the gradient of KL(reference‖π). In the reward, where no gradient flows, k1 gives the
gradient of KL(π‖reference). http://joschu.net/blog/kl-approx.html

Shapes: B rows of a microbatch, K positions of a row that may hold the model's tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Bound of |l_ref − l| in an exponential: e^20 is finite in float32 with room for sums."""

KlEstimator: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(log-probabilities of the policy (B, K), of the reference (B, K)) → estimate of each token (B, K), in nats."""


def k1(logprobs_BK: Tensor, reference_BK: Tensor) -> Tensor:
    """Return l − l_ref: unbiased, of either sign."""
    return logprobs_BK - reference_BK


def k2(logprobs_BK: Tensor, reference_BK: Tensor) -> Tensor:
    """Return (l − l_ref)² / 2."""
    return (logprobs_BK - reference_BK).square() / 2


def k3(logprobs_BK: Tensor, reference_BK: Tensor) -> Tensor:
    """Return exp(l_ref − l) − (l_ref − l) − 1: unbiased and at least 0; the difference is clamped to ±20 (GRPO,
    arXiv 2402.03300)."""
    difference_BK = (reference_BK - logprobs_BK).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(difference_BK) - difference_BK


def k3_unbiased(logprobs_BK: Tensor, reference_BK: Tensor) -> Tensor:
    """Return exp(l − l without gradient)·k3: the value of k3, and the gradient of KL(π‖reference)."""
    return (logprobs_BK - logprobs_BK.detach()).exp() * k3(logprobs_BK, reference_BK)


def check_estimate(returned: Tensor, logprobs: Tensor) -> None:
    """Check what an estimator returned for some log-probabilities.

    Raises:
        ValueError: it is no tensor of their shape.
    """
    if not isinstance(returned, Tensor):
        raise ValueError(f"it returned {type(returned).__name__}; it must return a tensor")
    if returned.shape != logprobs.shape:
        raise ValueError(
            f"it returned a tensor of shape {tuple(returned.shape)} for tokens of shape {tuple(logprobs.shape)}"
        )
