"""Interface of objectives: from log-probabilities and advantages to the value to maximise at each token.

``spec.algorithm.objective`` names a built-in objective or ``module:function`` of a user's package. An objective is
called once per microbatch with :class:`ObjectiveInputs` and returns an :class:`Objective`. A row is a sequence of a
sample: all of it, unless the sample has branches. At positions outside ``mask_BK`` the log-probabilities, advantages
and turns are 0. Values that an objective returns there are ignored: they may be nan, and no gradient flows from them.

Shapes: B rows of a microbatch, K positions of a row that may hold the model's tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from rljob.api.algorithm import Algorithm
from rljob.trainer.algorithms.returned_values import kind_of

MAX_LOG_RATIO = 20.0  # e^20 is finite in float32 with room for sums


@dataclass(frozen=True)
class ObjectiveInputs:
    """Arguments of an objective: one microbatch. Only ``logprobs_BK`` and ``entropy_BK`` carry gradients."""

    logprobs_BK: Tensor  # of the policy in training
    old: Tensor | None  # read ``old_BK``
    behavior_BK: Tensor  # of the engine when the token was sampled
    advantages_BK: Tensor
    mask_BK: Tensor  # True at the model's tokens
    rewards_B: Tensor  # of the samples, as the advantage saw them
    turns_BK: Tensor  # number of the turn of each token, from 0
    turns: int  # largest number of turns of a row
    algorithm: Algorithm  # resolved: clips and other settings
    entropy_BK: Tensor | None = None  # in nats; only with @requires(entropy=True) or an entropyCoefficient
    reference: Tensor | None = None  # read ``reference_BK``
    selected: Tensor | None = None  # read ``selected_BK``

    @property
    def old_BK(self) -> Tensor:
        """Log-probabilities of the policy before the batch's first update.

        Raises:
            ValueError: they were not computed. With several minibatches they cost a forward pass.
        """
        if self.old is None:
            raise ValueError("there are no old log-probabilities; declare @requires(old=True), or set ratio: proximal")
        return self.old

    @property
    def reference_BK(self) -> Tensor:
        """Log-probabilities of the reference model.

        Raises:
            ValueError: they were not computed.
        """
        if self.reference is None:
            raise ValueError("there are no log-probabilities of a reference; declare @requires(reference=True)")
        return self.reference

    @property
    def selected_BK(self) -> Tensor:
        """Whether the objective's selection contains the token.

        Raises:
            ValueError: the objective declares no selection.
        """
        if self.selected is None:
            raise ValueError("no tokens are selected; declare @selects(function) of algorithms.token_selection")
        return self.selected

    @property
    def denominator_BK(self) -> Tensor:
        """Log-probabilities that ``algorithm.ratio`` names as the denominator of the ratio."""
        return self.behavior_BK if self.algorithm.ratio == "behavior" else self.old_BK

    @property
    def log_ratio_BK(self) -> Tensor:
        """Log of the probability ratio, with the gradient of ``logprobs_BK``, clamped to ±20."""
        return (self.logprobs_BK - self.denominator_BK.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(frozen=True)
class Objective:
    """The objective of each token, to be maximised. Metrics use its ratio and whether it is clipped."""

    values_BK: Tensor
    ratio_BK: Tensor  # without gradient; ones if the objective has no ratio
    clipped_BK: Tensor  # bool, without gradient

    def check(self, mask_BK: Tensor) -> None:
        """Check types and shapes.

        Args:
            mask_BK: of the inputs.

        Raises:
            ValueError: a tensor has another shape or type, or the values have no gradient.
        """
        for name in ("values_BK", "ratio_BK", "clipped_BK"):
            value: object = getattr(self, name)
            if not isinstance(value, Tensor):
                raise ValueError(f"it returned {name} of type {kind_of(value)}; it must be a tensor of shape (B, K)")
            returned, expected = tuple(value.shape), tuple(mask_BK.shape)
            if returned != expected:
                raise ValueError(f"it returned {name} of shape {returned} for tokens of shape {expected}")
        if self.clipped_BK.dtype != torch.bool:
            raise ValueError(f"it returned clipped_BK of type {self.clipped_BK.dtype}; it must be bool")
        if not self.values_BK.requires_grad:
            raise ValueError("it returned values_BK without a gradient; they must depend on logprobs_BK")


def checked_objective(returned: object, mask_BK: Tensor) -> Objective:
    """Return what an objective returned.

    Args:
        returned: by the function.
        mask_BK: of its inputs.

    Raises:
        ValueError: it is no :class:`Objective`, or one of its tensors is wrong.
    """
    if not isinstance(returned, Objective):
        raise ValueError(
            f"it returned {kind_of(returned)}; it must return Objective(values_BK, ratio_BK, clipped_BK) of "
            "rljob.trainer.algorithms.objectives.base"
        )
    returned.check(mask_BK)
    return returned


Function = TypeVar("Function", bound=Callable[..., Any])


def zero_without_advantage(function: Function) -> Function:
    """Declare that the value and the gradient of an objective are 0 at tokens whose advantage is 0.

    Samples whose advantage is 0 are then not trained, if no other function needs them.
    """
    function.zero_without_advantage = True  # type: ignore[attr-defined]
    return function


def is_zero_without_advantage(function: Any) -> bool:
    """Return whether :func:`zero_without_advantage` marks the objective."""
    return getattr(function, "zero_without_advantage", False) is True


ObjectiveFunction: TypeAlias = Callable[[ObjectiveInputs], Objective]
