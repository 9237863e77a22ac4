"""Terms of a batch from models that are not trained: KL to a reference in the reward, and teachers in the advantage.

Both compare log-probabilities of the policy before the batch with those of the other model, at the model's tokens.

Shapes: N samples of the batch, L tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import torch

from rljob.api.algorithm import Algorithm
from rljob.protocol.batch_samples import BatchSample
from rljob.trainer.algorithms.advantages.base import Floats
from rljob.trainer.algorithms.kl_estimators import KlEstimator, check_estimate
from rljob.trainer.algorithms.needs import failure, load_function
from rljob.trainer.batch import Batch
from rljob.trainer.process_group import World
from rljob.trainer.scores import Scores


def penalize(
    batch: Batch, rewards: Mapping[int, Floats], scores: Scores, algorithm: Algorithm, world: World
) -> tuple[dict[int, Floats], list[BatchSample]]:
    """Return the rewards of tokens and the samples with β·KL subtracted, for the advantage; all ranks take part.

    The reward of a sample falls by the sum over its tokens.

    Args:
        batch: of this replica.
        rewards: of each token (L,), by index in the batch.
        scores: with log-probabilities before the batch and of the reference.
        algorithm: resolved, with a KL term in the reward.
        world: the ranks.

    Raises:
        UnrecoverableError: the estimator fails on any rank.
    """
    penalties: dict[int, Floats] = {}
    problem = None
    try:
        penalties = _penalties(batch, scores, algorithm)
    except Exception as error:  # noqa: BLE001 a user's estimator may raise anything: the run ends
        problem = failure(algorithm, "kl_estimator", error)
    world.raise_first_error(problem)
    total_N = torch.zeros(len(batch.train.samples), dtype=torch.float64)
    for i, penalty_L in penalties.items():
        total_N[i] = penalty_L.sum()
    # Each sample is on one replica, so the sum adds only zeros to its value.
    totals = world.sum_over_data(total_N.to(world.device)).tolist()
    samples = [
        msgspec.structs.replace(sample, reward=sample.reward - total)
        for sample, total in zip(batch.train.samples, totals, strict=True)
    ]
    return {i: rewards_L - penalties[i] for i, rewards_L in rewards.items()}, samples


def _penalties(batch: Batch, scores: Scores, algorithm: Algorithm) -> dict[int, Floats]:
    """Return β·KL at each token (L,) of this replica's rows; 0 except at the model's tokens."""
    estimator: KlEstimator = load_function(algorithm, "kl_estimator")
    assert algorithm.kl_coefficient is not None, "of a KL term"
    reference, penalties = scores.reference_by_row(), {}
    for i, old_L in scores.old_by_row().items():
        mask_L, given = batch.rows[i].mask_L, torch.from_numpy(old_L).double()
        kl_L = estimator(given, torch.from_numpy(reference[i]).double())
        check_estimate(kl_L, given)
        penalty_L = np.where(mask_L, algorithm.kl_coefficient * kl_L.numpy(), 0.0)
        if not np.isfinite(penalty_L).all():
            raise ValueError("it returned nan or an infinite number")
        penalties[i] = penalty_L
    return penalties


def teacher_terms(scores: Scores, algorithm: Algorithm) -> dict[int, Floats]:
    """Return Σ weight·(l_teacher − l_old) over the teachers of its task at each token (L,) of this replica's rows.

    It is minus the sum of the estimates k1 of weight·KL(π‖teacher): as an advantage of the token it gives minus the
    gradient of this sum at the states that the policy visits (on-policy distillation, arXiv 2306.13649; of several
    teachers 2601.02780).
    """
    teacher, terms = scores.teacher_by_row(), {}
    for i, old_L in scores.old_by_row().items():
        task = scores.batch.train.samples[i].task
        weight = sum(teacher.weight for teacher in algorithm.teachers if teacher.teaches(task))
        difference_L = teacher[i] - old_L.astype(np.float64)
        terms[i] = weight * difference_L if weight else np.zeros_like(difference_L)
    return terms
