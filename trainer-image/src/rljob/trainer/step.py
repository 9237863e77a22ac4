"""One training step: from a batch's scalars and this replica's rows to updated weights.

The loss of a minibatch is a sum over its tokens with weights that every rank computes from the scalars, so gradients do
not depend on the distribution of samples over ranks and microbatches.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rljob.api.algorithm import Algorithm
from rljob.api.algorithm_presets import corrects
from rljob.protocol.messages import Train
from rljob.trainer.algorithms.advantages.base import AdvantageInputs, Estimator
from rljob.trainer.algorithms.aggregation import masked_sum
from rljob.trainer.algorithms.corrections.base import Correction, CorrectionInputs, correction_weights
from rljob.trainer.algorithms.needs import failure, load_function, needs
from rljob.trainer.algorithms.objectives.base import ObjectiveFunction, ObjectiveInputs
from rljob.trainer.algorithms.stabilizers import shape_rewards, shape_tokens, stabilize
from rljob.trainer.backends.base import Backend, Loss, Output
from rljob.trainer.batch import Batch, Microbatch, MicrobatchInputs, Row, at_targets, lay_out
from rljob.trainer.batch_plan import BatchPlan, plan_batch
from rljob.trainer.errors import UnrecoverableError
from rljob.trainer.metrics import TokenStatistics, advantage_metrics, memory_peak
from rljob.trainer.process_group import World
from rljob.trainer.scores import Scores, score
from rljob.trainer.step_checks import StepChecks
from rljob.trainer.trained_samples import trained_samples

log = logging.getLogger(__name__)

Rewards = dict[int, NDArray[np.float64]]  # index in the batch → reward of each token


@dataclass(frozen=True)
class StepResult:
    """Result of a step."""

    metrics: dict[str, float]  # see metrics.METRICS
    advantages_N: NDArray[np.float32]  # mean over the model's tokens of each sample, in the order of the batch


def plan_step(train: Train, algorithm: Algorithm, world: World, budget: int) -> BatchPlan:
    """Return the plan of a batch for this replica; all ranks take part.

    Args:
        train: the batch's scalars.
        algorithm: resolved.
        world: the ranks.
        budget: maximum number of padded tokens of a microbatch.

    Raises:
        UnrecoverableError: the advantage fails.
    """
    trained_N = trained_samples(train, algorithm, world)
    return plan_batch(train, trained_N, algorithm.minibatches or 1, world.dp_rank, world.dp_size, budget)


def apply_batch(
    plan: BatchPlan,
    rows: Mapping[int, Row],
    algorithm: Algorithm,
    backend: Backend,
    world: World,
    checks: StepChecks,
) -> StepResult:
    """Apply a batch to the weights. All ranks call this together and get the same result except for timings.

    Args:
        plan: of the batch, for this replica.
        rows: the samples at ``plan.indices``, by index in the batch.
        algorithm: resolved.
        backend: model and optimizer.
        world: the ranks.
        checks: of this process.

    Raises:
        UnrecoverableError: the gradient was not finite several times in a row, a function of the algorithm fails on
            any rank, or the engine's log-probabilities of tokens of these weights differ from the trainer's.
    """
    backend.metrics()  # discards metrics since the last step
    train = shape_rewards(plan.train, algorithm)
    batch = lay_out(replace(plan, train=train), rows, algorithm, world)
    scores = score(batch, backend, algorithm)
    rewards = shape(batch, plan.train)
    advantages_N = set_advantages(batch, rewards, scores, algorithm, world)
    run, statistics = _runner(backend, algorithm), TokenStatistics(world.device)
    metrics: dict[str, float] = {}
    norms: list[float] = []
    for number, minibatch in enumerate(batch.minibatches):
        loss = PolicyLoss(minibatch, scores.old[number], number == 0, algorithm, statistics)
        run([inputs.tokens for inputs in minibatch], loss)
        world.raise_first_error(loss.error)
        if number == 0 and batch.has_current:
            first = train.check_initial_logprobs and backend.updates == 0
            mismatch = statistics.current_mismatch(world)
            metrics |= {"first_step_logprob_error": mismatch.largest} if first else {}
            checks.compare(mismatch, train.step, first)
        update = backend.update(train.step)
        checks.count_update(update, train.step, number)
        norms += [] if update.skipped else [update.norm]
        metrics["learning_rate"] = update.learning_rate
    metrics |= statistics.metrics(world, len(batch.minibatches)) | advantage_metrics(advantages_N)
    metrics["updates_skipped"] = float(len(batch.minibatches) - len(norms))
    metrics |= {"grad_norm": sum(norms) / len(norms) if norms else math.nan, "lockstep": plan.lockstep}
    metrics |= {"samples": float(len(train.samples)), "samples_trained": float(plan.trained)}
    metrics |= {"memory_peak_bytes": memory_peak(world)} | backend.metrics()
    return StepResult(metrics, advantages_N.numpy())


def _runner(backend: Backend, algorithm: Algorithm) -> Callable[[Sequence[Microbatch], Loss], list[Output]]:
    """Return the backend's ``run``, which computes entropies if the algorithm needs them.

    Raises:
        UnrecoverableError: the backend computes no entropies.
    """
    if not needs(algorithm).entropy:
        return backend.run
    if "entropy" not in inspect.signature(backend.run).parameters:
        raise UnrecoverableError(
            f"the algorithm needs entropies, which {type(backend).__name__} does not compute: its run has no parameter "
            "entropy; remove spec.algorithm.entropyCoefficient, or another need of entropies"
        )
    return functools.partial(backend.run, entropy=True)


def shape(batch: Batch, given: Train) -> Rewards:
    """Return the reward of each token of this replica's rows; changes of a sample's reward go to its last token.

    Args:
        batch: with the rewards that the algorithm uses.
        given: the same batch with the rewards of the task.
    """
    used, rewards = batch.train.samples, given.samples
    return {
        i: shape_tokens(row.rewards_L, row.mask_L, used[i].reward - rewards[i].reward) for i, row in batch.rows.items()
    }


def set_advantages(batch: Batch, rewards: Rewards, scores: Scores, algorithm: Algorithm, world: World) -> Tensor:
    """Estimate the advantages and store them in the microbatches; return the mean over each sample's tokens (N,).

    Raises:
        UnrecoverableError: the estimator fails on any rank.
    """
    estimator: Estimator = load_function(algorithm, "advantage")
    inputs = AdvantageInputs(batch.train.step, batch.train.samples, batch.rows, rewards, scores, world, algorithm)
    mean_N = np.zeros(len(batch.train.samples), np.float32)
    problem = None
    try:
        masks = {i: row.mask_L for i, row in batch.rows.items()}
        stable = stabilize(estimator(inputs), masks, batch.train.samples, algorithm, world)
        advantages = _checked(stable, batch.rows)
        for minibatch in batch.minibatches:
            for microbatch in minibatch:
                microbatch.advantages_BK = at_targets(microbatch.indices, microbatch.tokens, advantages, np.float32)
        mean_N = _mean_by_sample(advantages, batch)
    except torch.distributed.DistError:  # a collective of the estimator: another rank has failed
        raise
    except Exception as error:  # noqa: BLE001 a user's estimator may raise anything: the run ends
        problem = failure(algorithm, "advantage", error)
    world.raise_first_error(problem)
    # Each sample is on one replica, so the sum adds only zeros to its value.
    return world.sum_over_data(torch.from_numpy(mean_N).to(world.device)).cpu()


def _checked(advantages: Mapping[int, NDArray[np.float64]], rows: Mapping[int, Row]) -> dict[int, NDArray[np.float32]]:
    """Return the advantages as float32 (L,), checked to be finite at the model's tokens."""
    checked = {}
    for i, row in rows.items():
        if np.shape(advantages[i]) != row.mask_L.shape:
            raise ValueError(f"it returned an array of shape {np.shape(advantages[i])} for {len(row.mask_L)} tokens")
        with np.errstate(over="ignore", invalid="ignore"):  # checked below, at the model's tokens
            checked[i] = np.asarray(advantages[i]).astype(np.float32)
        if not np.isfinite(checked[i][row.mask_L]).all():
            raise ValueError("it returned nan or an infinite number in float32")
    return checked


def _mean_by_sample(advantages: Mapping[int, NDArray[np.float32]], batch: Batch) -> NDArray[np.float32]:
    """Return the mean advantage over the model's tokens of each sample (N,); 0 for samples of other replicas.

    If all tokens have one value, the mean is exactly this value: sums of float32 values are exact in float64. For a
    sample without tokens of the model it is the mean over all positions, with nan and infinite numbers counted as 0: an
    estimator that gives all positions of a sample one advantage reports it for this sample too.
    """
    samples = len(batch.train.samples)
    if not batch.rows:
        return np.zeros(samples, np.float32)
    rows = batch.rows.items()
    mask_T = np.concatenate([row.mask_L if row.mask_L.any() else ~row.mask_L for _, row in rows])
    values_T = np.concatenate([advantages[i] for i, _ in rows])[mask_T].astype(np.float64)
    values_T[~np.isfinite(values_T)] = 0.0
    owner_T = np.repeat([i for i, _ in rows], [len(row.mask_L) for _, row in rows])[mask_T]
    count_N = np.bincount(owner_T, minlength=samples)
    return (np.bincount(owner_T, values_T, samples) / np.maximum(count_N, 1)).astype(np.float32)


class PolicyLoss:
    """Loss of the policy over a minibatch, called once per microbatch; its tokens are counted in ``statistics``.

    If an objective fails on one rank, the other ranks still wait in the collectives of the backward pass. From then on
    the loss is 0, with a gradient of 0, and the rank takes part until the end of the minibatch. ``error`` holds the
    failure.

    Args:
        minibatch: microbatches with advantages.
        old: log-probabilities of each microbatch before the batch, or None.
        first: whether the weights are those before the batch, so that the forward pass gives the old log-probabilities.
        algorithm: resolved.
        statistics: of the step.
    """

    def __init__(
        self,
        minibatch: Sequence[MicrobatchInputs],
        old: Sequence[Tensor] | None,
        first: bool,
        algorithm: Algorithm,
        statistics: TokenStatistics,
    ) -> None:
        self._minibatch, self._old, self._first = minibatch, old, first
        self._algorithm, self._statistics = algorithm, statistics
        self._objective: ObjectiveFunction = load_function(algorithm, "objective")
        self._correction: Correction | None = load_function(algorithm, "correction") if corrects(algorithm) else None
        self._field = "objective"  # of the function that runs
        self.error: UnrecoverableError | None = None

    def __call__(self, i: int, output: Output) -> Tensor:
        """Return the share of microbatch ``i`` in the loss: a scalar that depends on the log-probabilities."""
        if self.error is None:
            try:
                return self._share(i, output)
            except Exception as error:  # noqa: BLE001 a user's function may raise anything: the run ends
                self.error = failure(self._algorithm, self._field, error)
        return output.logprobs_BK.where(torch.zeros_like(self._minibatch[i].tokens.mask_BK), 0.0).sum()

    def _share(self, i: int, output: Output) -> Tensor:
        inputs, tokens = self._minibatch[i], self._minibatch[i].tokens
        # where() stops the gradient of the other positions, also if it is nan.
        logprobs_BK = output.logprobs_BK.where(tokens.mask_BK, 0.0)
        old_BK = logprobs_BK.detach() if self._first else None
        if self._old is not None:
            old_BK = self._old[i].where(tokens.mask_BK, 0.0)
        entropy_BK = None if output.entropy_BK is None else output.entropy_BK.where(tokens.mask_BK, 0.0)
        self._field = "objective"
        objective = self._objective(
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
            )
        )
        objective.check(tokens.mask_BK)
        values_BK, weights_BK = objective.values_BK, None
        if self._correction is not None:
            assert old_BK is not None, "score() computes them for a correction"
            weights_BK = self._weights(logprobs_BK.detach(), old_BK, inputs)
            values_BK = values_BK * weights_BK
        if self._algorithm.entropy_coefficient:
            assert entropy_BK is not None, "the backend computes it"
            values_BK = values_BK + self._algorithm.entropy_coefficient * entropy_BK
        share = -masked_sum(values_BK, tokens.mask_BK, inputs.weights_B)
        self._statistics.add(share.detach(), objective, old_BK, weights_BK, entropy_BK, inputs)
        return share

    def _weights(self, current_BK: Tensor, old_BK: Tensor, inputs: MicrobatchInputs) -> Tensor:
        self._field = "correction"
        assert self._correction is not None
        return correction_weights(
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
