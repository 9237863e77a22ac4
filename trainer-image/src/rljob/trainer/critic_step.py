"""The critic's part of a training step: it learns the returns of the batch.

The target of a token is V + Σ (γλ)^k δ with the values V before the batch and `valueLambda` for λ: with 1 it is the
return of the token. The loss is a sum over the tokens of a minibatch with the weights of the policy's loss, so it does
not depend on the distribution of samples over ranks and microbatches.

Shapes: B rows of a microbatch, K positions of a row that may hold the model's tokens, L tokens of a sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rljob.api.algorithm import Algorithm
from rljob.trainer.algorithms.advantages.base import Floats
from rljob.trainer.algorithms.advantages.gae import discounted_errors
from rljob.trainer.algorithms.aggregation import masked_sum
from rljob.trainer.backends.base import Critic
from rljob.trainer.batch import Batch, MicrobatchInputs, at_targets
from rljob.trainer.process_group import World
from rljob.trainer.scores import Scores
from rljob.trainer.step_checks import StepChecks

SUMS = ("loss", "tokens", "clipped", "value", "target", "target_squared", "error", "error_squared")


@dataclass
class ValueStatistics:
    """Sums over tokens of this replica."""

    device: torch.device
    sums: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self.device)

    @torch.no_grad()
    def add(self, loss: Tensor, clipped_BK: Tensor, old_BK: Tensor, targets_BK: Tensor, mask_BK: Tensor) -> None:
        """Count one microbatch; values and targets are 0 outside the mask."""
        old_BK, targets_BK = old_BK.double(), targets_BK.double()
        error_BK = targets_BK - old_BK
        sums = [loss, mask_BK.sum(), (clipped_BK & mask_BK).sum(), old_BK.sum(), targets_BK.sum()]
        sums += [targets_BK.square().sum(), error_BK.sum(), error_BK.square().sum()]
        self.sums += torch.stack([value.double() for value in sums])

    def metrics(self, world: World, minibatches: int) -> dict[str, float]:
        """Return the metrics over all replicas, see ``metrics.METRICS``; all ranks take part."""
        total = dict(zip(SUMS, world.sum_over_data(self.sums.clone()).tolist(), strict=True))
        n = max(1.0, total["tokens"])
        variance = total["target_squared"] / n - (total["target"] / n) ** 2
        unexplained = total["error_squared"] / n - (total["error"] / n) ** 2
        smallest = 1e-12 * max(1.0, total["target_squared"] / n)  # rounding of the difference above
        return {
            "value_loss": total["loss"] / minibatches,
            "value_mean": total["value"] / n,
            "value_clip_fraction": total["clipped"] / n,
            "explained_variance": 1.0 - unexplained / variance if variance > smallest else 0.0,
        }


class CriticLoss:
    """Loss of the critic over a minibatch, called once per microbatch.

    ½·max((V − R)², (clip(V, V_old ± c) − R)²) at each token, with the target R and c = `valueClip` (as in PPO of OpenAI
    baselines, arXiv 1707.06347).

    Args:
        minibatch: its microbatches.
        old: values before the batch of each microbatch.
        targets: of each microbatch (B, K), 0 outside the mask.
        clip: c; 0: no clip.
        statistics: of the step.
    """

    def __init__(
        self,
        minibatch: Sequence[MicrobatchInputs],
        old: Sequence[Tensor],
        targets: Sequence[Tensor],
        clip: float,
        statistics: ValueStatistics,
    ) -> None:
        self._minibatch, self._old, self._targets = minibatch, old, targets
        self._clip, self._statistics = clip, statistics

    def __call__(self, i: int, values_BK: Tensor) -> Tensor:
        """Return the share of microbatch ``i`` in the loss: a scalar that depends on the values."""
        inputs, targets_BK = self._minibatch[i], self._targets[i]
        mask_BK = inputs.tokens.mask_BK
        # where() stops the gradient of the other positions, also if it is nan.
        values_BK, old_BK = values_BK.where(mask_BK, 0.0), self._old[i].where(mask_BK, 0.0)
        squares_BK = (values_BK - targets_BK).square()
        clipped_BK = torch.zeros_like(mask_BK)
        if self._clip:
            near_BK = old_BK + (values_BK - old_BK).clamp(-self._clip, self._clip)
            of_near_BK = (near_BK - targets_BK).square()
            clipped_BK = of_near_BK > squares_BK
            squares_BK = torch.where(clipped_BK, of_near_BK, squares_BK)
        share = masked_sum(squares_BK, mask_BK, inputs.weights_B) / 2
        self._statistics.add(share.detach(), clipped_BK, old_BK, targets_BK, mask_BK)
        return share


def value_targets(
    batch: Batch, rewards: Mapping[int, Floats], scores: Scores, algorithm: Algorithm
) -> list[list[Tensor]]:
    """Return the targets (B, K) of each microbatch of each minibatch; 0 except at the model's tokens.

    Args:
        batch: of this replica.
        rewards: of each token (L,), by index in the batch.
        scores: with values.
        algorithm: resolved, with a critic.
    """
    assert algorithm.discount is not None and algorithm.value_lambda is not None, "resolved"
    targets: dict[int, Floats] = {}
    for i, values_L in scores.values_by_row().items():
        mask_L = batch.rows[i].mask_L
        errors_L = discounted_errors(rewards[i], values_L, mask_L, algorithm.discount, algorithm.value_lambda)
        targets[i] = values_L + errors_L
    return [
        [at_targets(inputs.pieces, inputs.tokens, targets, np.float32) for inputs in minibatch]
        for minibatch in batch.minibatches
    ]


def train_critic(
    critic: Critic,
    batch: Batch,
    rewards: Mapping[int, Floats],
    scores: Scores,
    algorithm: Algorithm,
    world: World,
    checks: StepChecks,
) -> dict[str, float]:
    """Update the critic once for each minibatch; return its metrics. All ranks take part.

    Args:
        critic: its weights are those that computed the values of ``scores``.
        batch: of this replica.
        rewards: of each token, as the advantage sees them.
        scores: of the batch.
        algorithm: resolved, with a critic.
        world: the ranks.
        checks: of this process.

    Raises:
        UnrecoverableError: the gradient was not finite several times in a row.
    """
    assert algorithm.value_clip is not None, "resolved"
    assert scores.values is not None, "score() computes them"
    targets, statistics = value_targets(batch, rewards, scores, algorithm), ValueStatistics(world.device)
    norms: list[float] = []
    rate = 0.0
    for number, minibatch in enumerate(batch.minibatches):
        loss = CriticLoss(minibatch, scores.values[number], targets[number], algorithm.value_clip, statistics)
        critic.run([inputs.tokens for inputs in minibatch], loss)
        update = critic.update(batch.train.step)
        checks.count_update(update, batch.train.step, number, "criticOptimizer")
        norms += [] if update.skipped else [update.norm]
        rate = update.learning_rate
    return statistics.metrics(world, len(batch.minibatches)) | {
        "critic_grad_norm": sum(norms) / len(norms) if norms else math.nan,
        "critic_learning_rate": rate,
        "critic_updates_skipped": float(len(batch.minibatches) - len(norms)),
        **critic.metrics(),
    }
