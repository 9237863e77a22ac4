"""Advantages of episodes among the episodes of a group, and of steps among the steps of a group from the same state.

Shapes: N samples of the batch, L tokens of a sample, S turns of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rljob.protocol.batch_samples import BatchSample
from rljob.trainer.algorithms.advantages.base import AdvantageInputs, Floats
from rljob.trainer.algorithms.advantages.group import group_normalized, normalized


def gigpo(inputs: AdvantageInputs) -> dict[int, Floats]:
    """Return A(episode) + ω·A(step) for each token of a step (GiGPO, arXiv 2505.10978).

    A(episode) is that of `group_normalized`. A(step) is (R − mean) / (std + 1e-6) with the unbiased std over all steps
    of the group that start from the same state, in any episode; R = reward of the step + γ·R of the next step. It is 0
    for a state that occurs once or is not named, and in samples with branches.
    """
    algorithm = inputs.algorithm
    assert algorithm.discount is not None and algorithm.step_coefficient is not None, "resolved"
    episodes_N = group_normalized.of_samples(inputs.samples)
    steps = step_advantages(inputs.samples, algorithm.discount)
    advantages = {}
    for i, row in inputs.rows.items():
        advantages[i] = np.full(len(row.mask_L), episodes_N[i])
        if len(steps[i]):
            advantages[i] += algorithm.step_coefficient * steps[i][row.turns_L]
    return advantages


def step_advantages(samples: Sequence[BatchSample], discount: float) -> list[Floats]:
    """Return the advantage of each step (S,) of each sample among the steps of its group from the same state; empty for
    a sample without states.

    Args:
        samples: of the whole batch.
        discount: γ.
    """
    steps: list[Floats] = []
    same: dict[tuple[str, str], list[tuple[int, int, float]]] = {}  # (group, state) → (sample, turn, return)
    for i, sample in enumerate(samples):
        known = bool(sample.turn_states) and not sample.sequences
        returns_S = discounted_returns(sample, discount) if known else np.zeros(0)
        steps.append(np.zeros_like(returns_S))
        for turn, value in enumerate(returns_S):
            if sample.turn_states[turn]:
                same.setdefault((sample.group, sample.turn_states[turn]), []).append((i, turn, float(value)))
    for found in same.values():
        if len(found) > 1:
            advantages_C = normalized(np.array([value for _, _, value in found]))
            for (i, turn, _), advantage in zip(found, advantages_C, strict=True):
                steps[i][turn] = advantage
    return steps


def discounted_returns(sample: BatchSample, discount: float) -> Floats:
    """Return the return of each step (S,). A change of the sample's reward since it was scored counts for its last
    step."""
    returns_S = np.array(sample.turn_rewards, np.float64)
    returns_S[-1] += sample.reward - returns_S.sum()
    for turn in range(len(returns_S) - 2, -1, -1):
        returns_S[turn] += discount * returns_S[turn + 1]
    return returns_S
