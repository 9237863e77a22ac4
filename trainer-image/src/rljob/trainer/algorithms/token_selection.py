"""Selection of tokens over a whole batch: which tokens an objective treats apart, by their rank among all tokens.

An objective is called once per microbatch and cannot compare its tokens with those of other microbatches and ranks.
With :func:`selects` it declares a function that is called once per batch on all ranks, before the first update, with
the log-probabilities of then. So a selection depends neither on microbatches, ranks and the order of samples, nor on
the minibatches.

Shapes: T tokens of the model of this replica's samples, N samples of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from rljob.api.algorithm import Algorithm
from rljob.trainer.algorithms.advantages.base import Floats

if TYPE_CHECKING:  # a user's objective loads without a process group
    from rljob.trainer.process_group import World

Bools: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True)
class SelectionInputs:
    """Arguments of a selection: the tokens of this replica, which may have none. Ranks of one replica have the same."""

    samples_T: NDArray[np.int64]  # index of the token's sample in the batch
    samples: int  # of the batch
    advantages_T: Floats
    logprobs_T: Floats  # of the policy before the batch
    log_ratio_T: Floats  # of the policy before the batch to the denominator; 0 for `ratio: proximal`
    keys_T: Floats  # in [0, 1): a random number for each token, of its step, sample and place
    world: World
    algorithm: Algorithm  # resolved

    def totals(self, values: Sequence[Floats]) -> list[float]:
        """Return the sum over all tokens of the batch of each array (T,): the same bits for any split over ranks."""
        sums_VN = np.stack([np.bincount(self.samples_T, values_T, self.samples) for values_T in values])
        # Each sample is on one replica, so the sum over replicas adds only zeros to its values.
        whole_VN = self.world.sum_over_data(torch.from_numpy(sums_VN).to(self.world.device)).cpu().numpy()
        return [math.fsum(sums_N) for sums_N in whole_VN]

    def number(self, share: float) -> int:
        """Return the number of tokens of a share of the batch, at least 1."""
        (tokens,) = self.totals([np.ones(len(self.samples_T))])
        return max(1, int(share * tokens))


Selection: TypeAlias = Callable[[SelectionInputs], Bools]
"""(inputs) → whether each token is selected (T,)."""
Function = TypeVar("Function", bound=Callable[..., Any])


def selects(selection: Selection) -> Callable[[Function], Function]:
    """Declare the selection of an objective, which reads it as ``inputs.selected_BK``.

    The log-probabilities before the batch are then computed for all minibatches before the first update. With
    ``@zero_without_advantage`` a selection may lack the tokens of samples whose advantage is 0: its totals are then
    those of the trained samples.
    """

    def declare(function: Function) -> Function:
        function.selection = selection  # type: ignore[attr-defined]
        return function

    return declare


def selection_of(function: Any) -> Selection | None:
    """Return the selection that :func:`selects` declared for an objective, or None."""
    selection: Selection | None = getattr(function, "selection", None)
    return selection


def covariances(inputs: SelectionInputs) -> Floats:
    """Return (A − mean A)·(l − mean l) of each token (T,), the means over all tokens of the batch (arXiv 2505.22617).

    Their mean is the covariance of advantage and log-probability, by which one update changes the entropy.
    """
    ones_T = np.ones(len(inputs.samples_T))
    tokens, advantage, logprob = inputs.totals([ones_T, inputs.advantages_T, inputs.logprobs_T])
    count = max(tokens, 1.0)
    return (inputs.advantages_T - advantage / count) * (inputs.logprobs_T - logprob / count)


def first_tokens(inputs: SelectionInputs, scores_T: Floats, allowed_T: Bools, count: int) -> Bools:
    """Return which tokens are the ``count`` allowed ones with the largest scores of the batch (T,).

    Equal scores are in the order of the keys: a random one, which is the same for any split over ranks.
    """
    allowed = np.flatnonzero(allowed_T)
    own = allowed[np.lexsort((inputs.keys_T[allowed], -scores_T[allowed]))[:count]]
    found = inputs.world.gather((scores_T[own], inputs.keys_T[own]))
    scores, keys = (np.concatenate(parts) for parts in zip(*found, strict=True))
    keys, places = np.unique(keys, return_index=True)  # ranks of one replica have the same tokens
    chosen = keys[np.lexsort((keys, -scores[places]))[:count]]
    return np.isin(inputs.keys_T, chosen)
