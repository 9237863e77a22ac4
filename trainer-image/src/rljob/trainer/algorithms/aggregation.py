"""Aggregation: combines the objectives of all tokens of a minibatch into one loss.

``spec.algorithm.aggregation`` names a built-in function or ``module:function`` of a user's package. It is called with
two integer arrays over all samples of the global minibatch, the number of the model's tokens and the token limit of the
sample's task, and returns the weight of each sample's tokens. The loss is minus the weighted sum over all tokens. The
weight of a sample without tokens is ignored: it may be nan or infinite, as one over its tokens is. Every rank has these
scalars, so the loss does not depend on the distribution of samples over ranks and microbatches.

Shapes: N samples of a minibatch, B rows of a microbatch, K positions of a row that may hold the model's tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Aggregation: TypeAlias = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float64]]
"""(response tokens (N,), token limits (N,)) → weight of each sample's tokens (N,)."""


def token_mean(response_tokens: NDArray[np.int64], max_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one over the response tokens of all samples."""
    return np.full(len(response_tokens), 1.0 / max(1, int(response_tokens.sum())))


def seq_mean_token_sum(response_tokens: NDArray[np.int64], max_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one over the samples: the mean over samples of the sum over their tokens."""
    return np.full(len(response_tokens), 1.0 / max(1, len(response_tokens)))


def seq_mean_token_mean(response_tokens: NDArray[np.int64], max_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one over (samples × the sample's tokens): the mean over samples of the mean over their tokens."""
    return 1.0 / (len(response_tokens) * response_tokens.astype(np.float64))


def seq_mean_token_sum_norm(response_tokens: NDArray[np.int64], max_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one over (samples × the sample's token limit), so that long answers are not down-weighted (Dr. GRPO)."""
    return 1.0 / (len(max_tokens) * max_tokens.astype(np.float64))


def masked_sum(values_BK: Tensor, mask_BK: Tensor, weights_B: Tensor) -> Tensor:
    """Return the sum of the values where the mask is set, each times its row's weight."""
    return (values_BK * weights_B.unsqueeze(-1)).where(mask_BK, 0.0).sum()
