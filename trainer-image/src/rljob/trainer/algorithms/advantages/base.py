"""Interface of advantage estimators: from the rewards of a batch to an advantage for each token.

``spec.algorithm.advantage`` names a built-in estimator or ``module:function`` of a user's package. An estimator is
called once per batch, on all ranks, with :class:`AdvantageInputs`, and returns for each local row an array with one
advantage for each token of the row. Only the advantages of the model's tokens are used: they must be finite, and the
others may be nan. Three decorators simplify the usual estimators:

    @per_group
    def centered(rewards_G):            # rewards of one group → an advantage for each member
        return rewards_G - rewards_G.mean()

    @from_scalars
    def scaled(scalars):                # rewards, groups and lengths of the batch → an advantage for each sample
        return scalars.rewards_N / scalars.rewards_N.std()

    @per_batch
    def whitened(inputs):               # scalars of the whole batch → an advantage for each sample
        return (inputs.rewards_N - inputs.rewards_N.mean()) / (inputs.rewards_N.std() + 1e-6)

Shapes: N samples of the batch, G members of a group, L tokens of a sample, prompt included.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rljob.api.algorithm import Algorithm
from rljob.protocol.batch_samples import BatchSample
from rljob.trainer.algorithms.returned_values import numbers_of

if TYPE_CHECKING:  # a module of estimators loads without torch, as in the preflight
    from rljob.trainer.batch import Row
    from rljob.trainer.process_group import World
    from rljob.trainer.scores import Scores

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class AdvantageInputs:
    """Arguments of an estimator.

    ``samples`` and everything with suffix N is the whole batch, the same on all ranks and in the order of the batch.
    ``rows``, ``rewards`` and ``scores`` hold the samples of this data-parallel rank, by their index in the batch: an
    estimator that combines them over the batch sums over ``world``. A rank may have no rows. Only an estimator of
    :func:`from_scalars` or :func:`per_group` may lack rows of samples: those whose advantage is 0.

    ``scores.old_by_row()`` returns the log-probabilities under the weights before the batch, float32 (L,) in nats, of
    each row of ``rows``; 0 except at the model's tokens. It raises ValueError unless the estimator declares
    ``@requires(old=True)`` of :mod:`rljob.trainer.algorithms.needs`. ``reference_by_row()`` and ``teacher_by_row()``
    return those of other models.
    """

    step: int  # 0-based training step
    samples: Sequence[BatchSample]  # each with its group, reward (minus KL), tokens and oldest policy version
    rows: Mapping[int, Row]  # token ids, mask and the engine's log-probabilities
    rewards: Mapping[int, Floats]  # (L,) reward that arrives at each token
    scores: Scores  # results of forward passes that the estimator requires
    world: World
    algorithm: Algorithm

    @cached_property
    def rewards_N(self) -> Floats:
        """Reward of each sample."""
        return rewards_of(self.samples)

    @cached_property
    def lengths_N(self) -> NDArray[np.int64]:
        """Number of the model's tokens in each sample."""
        return lengths_of(self.samples)

    @cached_property
    def groups_N(self) -> NDArray[np.int64]:
        """Number of each sample's group, from 0 in order of appearance."""
        return group_numbers(self.samples)


Estimator: TypeAlias = Callable[[AdvantageInputs], Mapping[int, Floats]]
"""(inputs) → advantage of each token, (L,), of each row of ``inputs.rows``."""


def per_batch(function: Callable[[AdvantageInputs], Floats]) -> Estimator:
    """Make an estimator from a function that returns one advantage for each sample of the batch, (N,)."""

    @functools.wraps(function)
    def estimate(inputs: AdvantageInputs) -> dict[int, Floats]:
        advantages_N = numbers_of(function(inputs), len(inputs.samples), f"{len(inputs.samples)} samples")
        return {i: np.full(len(row.mask_L), advantages_N[i]) for i, row in inputs.rows.items()}

    return estimate


@dataclass(frozen=True)
class Scalars:
    """The scalars of a batch, known before its tokens are fetched; the same on all ranks."""

    rewards_N: Floats
    lengths_N: NDArray[np.int64]  # the model's tokens
    groups_N: NDArray[np.int64]  # number of the group, from 0 in order of appearance
    baselines_N: Floats
    """Reward of the greedy answer of the group; nan without one. Only groups of the built-in ``remax`` have one: to an
    advantage of your own all are nan."""

    def by_group(self) -> Iterator[NDArray[np.int64]]:
        """Yield the indices of each group's members, in the order of the batch."""
        order = np.argsort(self.groups_N, kind="stable")
        yield from np.split(order, np.flatnonzero(np.diff(self.groups_N[order])) + 1)


class ScalarEstimator:
    """An estimator whose advantages depend on nothing but scalars of the batch; see :func:`from_scalars`."""

    def __init__(self, function: Callable[[Scalars], Floats]) -> None:
        self._function = function
        functools.update_wrapper(self, function)

    def __call__(self, inputs: AdvantageInputs) -> dict[int, Floats]:
        """Return the advantage of each token of each row: that of its sample."""
        advantages_N = self.of_samples(inputs.samples)
        return {i: np.full(len(row.mask_L), advantages_N[i]) for i, row in inputs.rows.items()}

    def of_samples(self, samples: Sequence[BatchSample]) -> Floats:
        """Return the advantage of each sample of a batch (N,).

        Raises:
            ValueError: the function returned no numbers, or an array of another shape.
        """
        baselines_N = np.asarray([np.nan if s.baseline is None else s.baseline for s in samples], dtype=np.float64)
        scalars = Scalars(rewards_of(samples), lengths_of(samples), group_numbers(samples), baselines_N)
        return numbers_of(self._function(scalars), len(samples), f"{len(samples)} samples")


def from_scalars(function: Callable[[Scalars], Floats]) -> ScalarEstimator:
    """Make an estimator from a function that maps :class:`Scalars` to one advantage for each sample, (N,).

    These advantages are known before any token is fetched. So a sample whose advantage is 0 is not trained, if the
    objective is declared ``zero_without_advantage``.
    """
    return ScalarEstimator(function)


def per_group(function: Callable[[Floats], Floats]) -> ScalarEstimator:
    """Make an estimator from a function that maps the rewards of a group, (G,), to its members' advantages, (G,).

    As for :func:`from_scalars`, these advantages are known before any token is fetched.
    """

    @functools.wraps(function)
    def of_batch(scalars: Scalars) -> Floats:
        advantages_N = np.empty_like(scalars.rewards_N)
        for members in scalars.by_group():
            returned, size = function(scalars.rewards_N[members]), len(members)
            advantages_N[members] = numbers_of(returned, size, f"a group of {size}")
        return advantages_N

    return ScalarEstimator(of_batch)


def rewards_of(samples: Sequence[BatchSample]) -> Floats:
    """Return the reward of each sample (N,)."""
    return np.asarray([sample.reward for sample in samples], dtype=np.float64)


def lengths_of(samples: Sequence[BatchSample]) -> NDArray[np.int64]:
    """Return the number of the model's tokens in each sample (N,)."""
    return np.asarray([sample.response_tokens for sample in samples], dtype=np.int64)


def group_numbers(samples: Sequence[BatchSample]) -> NDArray[np.int64]:
    """Return the number of each sample's group (N,), from 0 in order of appearance."""
    numbers: dict[str, int] = {}
    return np.asarray([numbers.setdefault(sample.group, len(numbers)) for sample in samples], dtype=np.int64)
