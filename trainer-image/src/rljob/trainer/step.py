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
from rljob.api.algorithm_presets import penalizes_rewards
from rljob.protocol.batch_samples import BatchSample
from rljob.protocol.trainer_protocol import Train
from rljob.trainer.algorithms.advantages.base import AdvantageInputs, Estimator
from rljob.trainer.algorithms.needs import failure, load_function, needs
from rljob.trainer.algorithms.returned_values import numbers_of_rows
from rljob.trainer.algorithms.stabilizers import shape_rewards, shape_tokens, stabilize
from rljob.trainer.backends.base import Backend, Critic, FrozenModel, Loss, OptimizerUpdate, Output
from rljob.trainer.batch import Batch, Microbatch, MicrobatchInputs, Row, at_targets, lay_out, task_names
from rljob.trainer.batch_plan import BatchPlan, plan_batch
from rljob.trainer.critic_step import train_critic
from rljob.trainer.errors import UnrecoverableError
from rljob.trainer.kl_terms import penalize, teacher_terms
from rljob.trainer.metrics import TokenStatistics, advantage_metrics, memory_peak, sample_metrics
from rljob.trainer.policy_loss import PolicyLoss
from rljob.trainer.process_group import World
from rljob.trainer.scores import Scores, score
from rljob.trainer.select_tokens import select_tokens
from rljob.trainer.step_checks import StepChecks
from rljob.trainer.trained_samples import trained_samples

log = logging.getLogger(__name__)

Rewards = dict[int, NDArray[np.float64]]  # index in the batch → reward of each token


@dataclass(frozen=True)
class StepResult:
    """Result of a step."""

    metrics: dict[str, float]  # see metrics.METRICS
    advantages_N: NDArray[np.float32]  # mean over the model's tokens of each sample, in the order of the batch


def plan_step(train: Train, algorithm: Algorithm, world: World, budget: int, packed: bool = False) -> BatchPlan:
    """Return the plan of a batch for this replica; all ranks take part.

    Args:
        train: the batch's scalars.
        algorithm: resolved.
        world: the ranks.
        budget: maximum number of positions of a microbatch.
        packed: whether rows of a microbatch are computed without padding.

    Raises:
        UnrecoverableError: the advantage fails.
    """
    trained_N = trained_samples(train, algorithm, world)
    return plan_batch(train, trained_N, algorithm.minibatches or 1, world.dp_rank, world.dp_size, budget, packed)


def apply_batch(
    plan: BatchPlan,
    rows: Mapping[int, Row],
    algorithm: Algorithm,
    backend: Backend,
    world: World,
    checks: StepChecks,
    frozen: Mapping[str, FrozenModel] | None = None,
    critic: Critic | None = None,
) -> StepResult:
    """Apply a batch to the weights. All ranks call this together and get the same result except for timings.

    Args:
        plan: of the batch, for this replica.
        rows: the samples at ``plan.indices``, by index in the batch.
        algorithm: resolved.
        backend: model and optimizer.
        world: the ranks.
        checks: of this process.
        frozen: models that are not trained, by role.
        critic: if the algorithm has one.

    Raises:
        UnrecoverableError: the gradient was not finite several times in a row, a function of the algorithm fails on
            any rank, or the engine's log-probabilities of tokens of these weights differ from the trainer's.
    """
    backend.metrics()  # discards metrics since the last step
    train = shape_rewards(plan.train, algorithm)
    if train.earlier.kl_coefficient is not None:
        algorithm = algorithm.model_copy(update={"kl_coefficient": train.earlier.kl_coefficient})
    batch = lay_out(replace(plan, train=train), rows, algorithm, world)
    models = frozen or {}
    scores = score(batch, backend, algorithm, models, critic)
    rewards, samples = shape(batch, plan.train), train.samples
    if penalizes_rewards(algorithm):
        rewards, samples = penalize(batch, rewards, scores, algorithm, world)
    advantages_N = set_advantages(batch, rewards, samples, scores, algorithm, world)
    select_tokens(batch, scores, algorithm, world)
    run, statistics = _runner(backend, algorithm), TokenStatistics(world.device, task_names(train))
    metrics: dict[str, float] = {}
    if critic is not None:
        metrics |= train_critic(critic, batch, rewards, scores, algorithm, world, checks)
    warms_up = critic is not None and train.step < (algorithm.critic_warmup_steps or 0)
    updates: list[OptimizerUpdate] = []
    for number, minibatch in enumerate(batch.minibatches):
        of_models = {role: passes[number] for role, passes in scores.frozen.items()}
        samples_of = (train.samples[i] for i in plan.minibatches[number])
        positive = sum(sample.response_tokens for sample in samples_of if sample.reward > 0)
        loss = PolicyLoss(minibatch, scores.old[number], of_models, number == 0, algorithm, statistics, positive)
        if warms_up:
            _observe(run, minibatch, loss)
        else:
            run([inputs.tokens for inputs in minibatch], loss)
        world.raise_first_error(loss.error)
        if number == 0 and batch.has_current:
            first = train.check_initial_logprobs and backend.updates == 0
            mismatch = statistics.current_mismatch(world)
            metrics |= {"first_step_logprob_error": mismatch.largest} if first else {}
            checks.compare(mismatch, train.step, first)
        if not warms_up:
            updates.append(backend.update(train.step))
            cause = loss.not_finite(world) if updates[-1].skipped else ""
            checks.count_update(updates[-1], train.step, number, cause=cause)
    if len(batch.minibatches) > 1:  # those whose log-probabilities before the batch are known
        checks.compare(statistics.current_mismatch(world), train.step, first=False)
    metrics |= statistics.metrics(world, len(batch.minibatches)) | advantage_metrics(advantages_N)
    metrics |= _update_metrics(updates) | {"lockstep": plan.lockstep}
    if algorithm.kl_coefficient is not None:
        metrics["kl_coefficient"] = algorithm.kl_coefficient
    metrics |= sample_metrics([sample.task for sample in train.samples], plan.trained_N, statistics.tasks)
    metrics |= {"memory_peak_bytes": memory_peak(world)} | backend.metrics()
    for model in dict.fromkeys(models.values()):
        for name, value in model.metrics().items():
            metrics[name] = metrics.get(name, 0.0) + value
    return StepResult(metrics, advantages_N.numpy())


def _observe(run: Callable[..., list[Output]], minibatch: Sequence[MicrobatchInputs], loss: PolicyLoss) -> None:
    """Count the tokens of a minibatch in the statistics of ``loss``, without a gradient of the weights."""
    for i, output in enumerate(run([inputs.tokens for inputs in minibatch], None)):
        loss(i, replace(output, logprobs_BK=output.logprobs_BK.clone().requires_grad_()))


def _update_metrics(updates: Sequence[OptimizerUpdate]) -> dict[str, float]:
    """Return the metrics of the policy's updates; all 0 if there was none, while only the critic is trained."""
    norms = [update.norm for update in updates if not update.skipped]
    mean = sum(norms) / len(norms) if norms else math.nan
    return {
        "learning_rate": updates[-1].learning_rate if updates else 0.0,
        "updates_skipped": float(len(updates) - len(norms)),
        "grad_norm": mean if updates else 0.0,
    }


def _runner(backend: Backend, algorithm: Algorithm) -> Callable[[Sequence[Microbatch], Loss | None], list[Output]]:
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


def set_advantages(
    batch: Batch,
    rewards: Rewards,
    samples: Sequence[BatchSample],
    scores: Scores,
    algorithm: Algorithm,
    world: World,
) -> Tensor:
    """Estimate the advantages and store them in the microbatches; return the mean over each sample's tokens (N,).

    Args:
        batch: this replica's microbatches.
        rewards: of each token, for the estimator.
        samples: of the whole batch, for the estimator.
        scores: for the estimator and teachers.
        algorithm: resolved.
        world: the ranks.

    Raises:
        UnrecoverableError: the estimator fails on any rank.
    """
    estimator: Estimator = load_function(algorithm, "advantage")
    inputs = AdvantageInputs(batch.train.step, samples, batch.rows, rewards, scores, world, algorithm)
    mean_N = np.zeros(len(batch.train.samples), np.float32)
    problem = None
    try:
        masks = {i: row.mask_L for i, row in batch.rows.items()}
        added = teacher_terms(scores, algorithm) if algorithm.teachers else None
        found = numbers_of_rows(estimator(inputs), {i: len(mask_L) for i, mask_L in masks.items()})
        stable = stabilize(found, masks, batch.train.samples, algorithm, world, added)
        advantages = _checked(stable, batch.rows)
        for minibatch in batch.minibatches:
            for microbatch in minibatch:
                microbatch.advantages_BK = at_targets(microbatch.pieces, microbatch.tokens, advantages, np.float32)
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
