"""Loss of the policy: the objective of each token, its KL term, weight and entropy bonus, summed over a minibatch, and
the likelihood of samples with a positive reward.

Shapes: B rows of a microbatch, K positions of a row that may hold the model's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from pydantic.alias_generators import to_camel
from torch import Tensor

from rljob.api.algorithm import Algorithm
from rljob.api.algorithm_presets import corrects, penalizes_rewards
from rljob.trainer.algorithms.aggregation import masked_sum
from rljob.trainer.algorithms.corrections.base import Correction, CorrectionInputs, correction_weights
from rljob.trainer.algorithms.kl_estimators import KlEstimator, check_estimate
from rljob.trainer.algorithms.needs import failure, load_function, refused
from rljob.trainer.algorithms.objectives.base import ObjectiveFunction, ObjectiveInputs, checked_objective
from rljob.trainer.backends.base import Output
from rljob.trainer.batch import MicrobatchInputs
from rljob.trainer.errors import UnrecoverableError
from rljob.trainer.metrics import TokenStatistics
from rljob.trainer.process_group import World


class PolicyLoss:
    """Loss of the policy over a minibatch, called once per microbatch; its tokens are counted in ``statistics``.

    If an objective fails on one rank, the other ranks still wait in the collectives of the backward pass. From then on
    the loss is 0, with a gradient of 0, and the rank takes part until the end of the minibatch. :meth:`error` returns
    the failure.

    Args:
        minibatch: microbatches with advantages.
        old: log-probabilities of each microbatch before the batch, or None.
        frozen: log-probabilities of each microbatch under models that are not trained, by kind.
        first: whether the weights are those before the batch, so that the forward pass gives the old log-probabilities.
        algorithm: resolved.
        statistics: of the step.
        positive_tokens: number of the model's tokens in samples of the minibatch with a positive reward, of all ranks.
    """

    def __init__(
        self,
        minibatch: Sequence[MicrobatchInputs],
        old: Sequence[Tensor] | None,
        frozen: Mapping[str, Sequence[Tensor]],
        first: bool,
        algorithm: Algorithm,
        statistics: TokenStatistics,
        positive_tokens: int = 0,
    ) -> None:
        self._positive_tokens = positive_tokens
        self._minibatch, self._old, self._frozen, self._first = minibatch, old, frozen, first
        self._algorithm, self._statistics = algorithm, statistics
        self._objective: ObjectiveFunction = load_function(algorithm, "objective")
        self._correction: Correction | None = load_function(algorithm, "correction") if corrects(algorithm) else None
        in_loss = algorithm.kl_coefficient is not None and not penalizes_rewards(algorithm)
        self._kl: KlEstimator | None = load_function(algorithm, "kl_estimator") if in_loss else None
        self._field = "objective"  # of the function that runs
        self._error: UnrecoverableError | None = None
        self._negative: Tensor | None = None  # tokens with a weight below 0, counted on the device
        self._not_finite: dict[str, Tensor] = {}  # field → tokens where only the function is not finite, on the device

    @property
    def error(self) -> UnrecoverableError | None:
        """Failure of a function of the algorithm, or None.

        With a correction it waits for the device: read it once per minibatch, before the update, which waits too.
        """
        if self._error is None and self._negative is not None and (count := int(self._negative)):
            self._error = refused(
                self._algorithm,
                "correction",
                f"returned a weight below 0 at {count} tokens, which reverses their gradient; return at least 0",
            )
        return self._error

    def not_finite(self, world: World) -> str:
        """Return which functions were nan or infinite at tokens with finite log-probabilities; empty if none was.

        All ranks take part. It waits for the device, so it is for the cause of an update that was skipped.
        """
        counts = {field: int(world.sum_over_data(count.clone())) for field, count in self._not_finite.items()}
        return " and ".join(
            f"spec.algorithm.{to_camel(field)} {getattr(self._algorithm, field)} was nan or infinite at {count} tokens"
            for field, count in counts.items()
            if count
        )

    def __call__(self, i: int, output: Output) -> Tensor:
        """Return the share of microbatch ``i`` in the loss: a scalar that depends on the log-probabilities."""
        if self._error is None:
            try:
                return self._share(i, output)
            except Exception as error:  # noqa: BLE001 a user's function may raise anything: the run ends
                self._error = failure(self._algorithm, self._field, error)
        return output.logprobs_BK.where(torch.zeros_like(self._minibatch[i].tokens.mask_BK), 0.0).sum()

    def _share(self, i: int, output: Output) -> Tensor:
        inputs, tokens = self._minibatch[i], self._minibatch[i].tokens
        # where() stops the gradient of the other positions, also if it is nan.
        logprobs_BK = output.logprobs_BK.where(tokens.mask_BK, 0.0)
        old_BK = logprobs_BK.detach() if self._first else None
        if self._old is not None:
            old_BK = self._old[i].where(tokens.mask_BK, 0.0)
        frozen = {role: passes[i].where(tokens.mask_BK, 0.0) for role, passes in self._frozen.items()}
        entropy_BK = None if output.entropy_BK is None else output.entropy_BK.where(tokens.mask_BK, 0.0)
        self._field = "objective"
        returned = self._objective(
            ObjectiveInputs(
                logprobs_BK=logprobs_BK,
                old=old_BK,
                behavior_BK=tokens.behavior_BK,
                advantages_BK=inputs.advantages_BK,
                mask_BK=tokens.mask_BK,
                rewards_B=inputs.rewards_B,
                turns_BK=inputs.turns_BK,
                turns=inputs.turns,
                algorithm=self._algorithm,
                entropy_BK=entropy_BK,
                reference=frozen.get("reference"),
                selected=inputs.selected_BK,
            )
        )
        objective = checked_objective(returned, tokens.mask_BK)
        self._count("objective", objective.values_BK, tokens.mask_BK, logprobs_BK, tokens.behavior_BK)
        values_BK, weights_BK = objective.values_BK, None
        if self._kl is not None:
            kl_BK = self._penalty(logprobs_BK, frozen["reference"])
            self._count("kl_estimator", kl_BK, tokens.mask_BK, logprobs_BK, frozen["reference"])
            values_BK = values_BK - kl_BK
        if self._correction is not None:
            assert old_BK is not None, "score() computes them for a correction"
            weights_BK = self._weights(logprobs_BK.detach(), old_BK, inputs)
            values_BK = values_BK * weights_BK
        if self._algorithm.entropy_coefficient:
            assert entropy_BK is not None, "the backend computes it"
            values_BK = values_BK + self._algorithm.entropy_coefficient * entropy_BK
        share = -masked_sum(values_BK, tokens.mask_BK, inputs.weights_B)
        if self._algorithm.positive_coefficient and self._positive_tokens:
            positive_B = (inputs.rewards_B > 0).to(logprobs_BK.dtype)
            weight = self._algorithm.positive_coefficient / self._positive_tokens
            share = share - masked_sum(logprobs_BK, tokens.mask_BK, weight * positive_B)
        if self._algorithm.loss_scale is not None:
            share = self._algorithm.loss_scale * share
        self._statistics.add(share.detach(), objective, old_BK, weights_BK, entropy_BK, inputs)
        for role, frozen_BK in frozen.items():
            self._statistics.add_kl(role, logprobs_BK.detach() - frozen_BK, tokens.mask_BK & ~frozen_BK.isnan())
        return share

    @torch.no_grad()
    def _count(self, field: str, values_BK: Tensor, mask_BK: Tensor, *given_BK: Tensor) -> None:
        """Count the tokens at which a function's values are not finite, though the log-probabilities given are."""
        wrong_BK = mask_BK & ~values_BK.isfinite()
        for logprobs_BK in given_BK:
            wrong_BK &= logprobs_BK.isfinite()
        self._not_finite[field] = self._not_finite.get(field, torch.zeros_like(wrong_BK.sum())) + wrong_BK.sum()

    def _penalty(self, logprobs_BK: Tensor, reference_BK: Tensor) -> Tensor:
        """Return β·KL of each token (B, K), with the gradient of the log-probabilities."""
        self._field = "kl_estimator"
        assert self._kl is not None and self._algorithm.kl_coefficient is not None
        kl_BK = self._kl(logprobs_BK, reference_BK)
        check_estimate(kl_BK, logprobs_BK)
        return self._algorithm.kl_coefficient * kl_BK

    def _weights(self, current_BK: Tensor, old_BK: Tensor, inputs: MicrobatchInputs) -> Tensor:
        self._field = "correction"
        assert self._correction is not None
        weights_BK = correction_weights(
            self._correction,
            CorrectionInputs(
                old_BK=old_BK,
                behavior_BK=inputs.tokens.behavior_BK,
                current_BK=current_BK,
                advantages_BK=inputs.advantages_BK,
                mask_BK=inputs.tokens.mask_BK,
                turns_BK=inputs.turns_BK,
                turns=inputs.turns,
                algorithm=self._algorithm,
            ),
        )
        negative = (weights_BK < 0).sum()
        self._negative = negative if self._negative is None else self._negative + negative
        return weights_BK
