"""Objectives and aggregation against a reference in plain Python, and known mistakes of public code."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rljob.api.algorithm import Algorithm
from rljob.trainer.algorithms.aggregation import (
    masked_sum,
    seq_mean_token_mean,
    seq_mean_token_sum,
    seq_mean_token_sum_norm,
    token_mean,
)
from rljob.trainer.algorithms.objectives.base import Objective, ObjectiveInputs
from rljob.trainer.algorithms.objectives.clip_cov import clip_cov
from rljob.trainer.algorithms.objectives.ppo_clip import ppo_clip

LOW, HIGH = 0.2, 0.28
logprob = st.floats(-40, 0)
advantage = st.floats(-5, 5)


def reference_objective(new: float, old: float, advantage: float, dual: float | None) -> float:
    """PPO's objective of one token, written from the paper."""
    ratio = math.exp(max(-20.0, min(20.0, new - old)))
    if advantage >= 0:
        return min(ratio, 1 + HIGH) * advantage
    value = max(ratio, 1 - LOW) * advantage
    return value if dual is None else max(value, dual * advantage)


def objective(new, old, advantages, dual=None, function=ppo_clip, selected=None) -> Objective:
    """Return an objective of rows whose tokens share one advantage."""
    new, old, advantages = (torch.as_tensor(values, dtype=torch.float64) for values in (new, old, advantages))
    algorithm = Algorithm(clip_low=LOW, clip_high=HIGH, dual_clip=dual, ratio="behavior")
    advantages_BK = advantages.unsqueeze(-1).expand(new.shape)
    mask_BK = torch.ones_like(new, dtype=torch.bool)
    turns_BK = mask_BK.long()
    inputs = ObjectiveInputs(
        new, old, old, advantages_BK, mask_BK, advantages, turns_BK, 1, algorithm, selected=selected
    )
    return function(inputs)


@given(
    st.lists(st.tuples(logprob, logprob, advantage), min_size=1, max_size=20),
    st.one_of(st.none(), st.floats(1.01, 10)),
)
def test_every_token_has_the_objective_of_the_paper(tokens, dual):
    new, old, advantages = (list(column) for column in zip(*tokens, strict=True))
    result = objective([[x] for x in new], [[x] for x in old], advantages, dual)
    values, clipped = result.values_BK, result.clipped_BK
    expected = [reference_objective(*token, dual) for token in tokens]
    np.testing.assert_allclose(values[:, 0].numpy(), expected, rtol=1e-9, atol=1e-12)
    for (n, o, a), held in zip(tokens, clipped[:, 0].tolist(), strict=True):
        assert held == (not math.isclose(reference_objective(n, o, a, dual), math.exp(max(-20, min(20, n - o))) * a))


@given(st.lists(st.tuples(logprob, logprob, advantage), min_size=1, max_size=20), st.floats(1.01, 10))
def test_a_dual_clip_bounds_the_objective_of_a_bad_sample(tokens, dual):
    new, old, advantages = (list(column) for column in zip(*tokens, strict=True))
    values = objective([[x] for x in new], [[x] for x in old], advantages, dual).values_BK
    for value, a in zip(values[:, 0].tolist(), advantages, strict=True):
        assert value >= min(dual * a, 0) * (1 + 1e-12)


def test_the_gradient_is_that_of_the_ratio_and_stops_where_a_clip_holds():
    new = torch.tensor([[-1.0, -1.0, -1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.0, -1.1, -2.0, 0.0]], dtype=torch.float64)
    result = objective(new, old, [2.0])
    values, clipped = result.values_BK, result.clipped_BK
    values.sum().backward()
    assert clipped.tolist() == [[False, False, True, False]]
    np.testing.assert_allclose(new.grad[0], [2.0, 2 * math.exp(0.1), 0.0, 2 * math.exp(-1)])


def test_the_denominator_carries_no_gradient():
    """Mistake 5: importance weights that are not detached."""
    new = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    values = objective(new, new, [1.0]).values_BK
    values.sum().backward()
    assert new.grad.item() == 1.0  # with a gradient through the denominator it would be 0


def test_a_stale_engine_is_clipped():
    """Mistake 8: clipping that is silently off in asynchronous mode, where the ratio is not 1."""
    result = objective([[-1.0, -1.0]], [[-3.0, -1.0]], [1.0])
    assert result.clipped_BK.tolist() == [[True, False]]
    assert result.values_BK[0, 0].item() == pytest.approx(1 + HIGH)


def test_drawn_tokens_count_as_clipped():
    drawn = torch.tensor([[False, True, False]])
    result = objective([[-1.0, -1.0, -1.0]], [[-3.0, -1.0, -1.0]], [1.0], function=clip_cov, selected=drawn)
    assert result.clipped_BK.tolist() == [[True, True, False]]
    assert result.values_BK.tolist() == [[1 + HIGH, 0.0, 1.0]]


def test_ratios_do_not_grow_with_the_length_of_a_sequence():
    """Mistake 12: 1.1 for each of 100 tokens is a sequence ratio of 14,000."""
    new = torch.full((1, 100), math.log(0.5) + math.log(1.1))
    values = objective(new, torch.full((1, 100), math.log(0.5)), [1.0]).values_BK
    assert values.max().item() == pytest.approx(1.1, rel=1e-6)


def test_an_extreme_log_ratio_stays_finite():
    values = objective([[0.0, -1e4]], [[-1e4, 0.0]], [-1.0]).values_BK
    assert torch.isfinite(values).all()
    assert values[0, 0].item() == pytest.approx(-math.exp(20))


def test_masked_positions_have_no_effect():
    """Mistake 1: a token mean whose numerator ignores the mask."""
    values = torch.tensor([[1.0, float("nan")], [3.0, 1e30]], requires_grad=True)
    mask = torch.tensor([[True, False], [True, False]])
    total = masked_sum(values, mask, torch.tensor([0.5, 2.0]))
    total.backward()
    assert total.item() == 6.5
    assert values.grad.tolist() == [[0.5, 0.0], [2.0, 0.0]]


def test_a_row_without_tokens_has_no_effect():
    values = torch.tensor([[float("inf")], [2.0]], requires_grad=True)
    total = masked_sum(values, torch.tensor([[False], [True]]), torch.tensor([0.0, 1.0]))
    total.backward()
    assert total.item() == 2.0 and values.grad.tolist() == [[0.0], [1.0]]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.integers(50, 99))
def test_token_mean_gives_every_token_of_the_global_batch_the_same_weight(tokens, limit):
    weights = token_mean(np.array(tokens), np.array([limit] * len(tokens)))
    assert np.dot(weights, tokens) == pytest.approx(1)
    assert len(set(weights.tolist())) == 1


def test_aggregations_of_samples_divide_by_samples_and_by_tokens_or_each_tasks_limit():
    tokens, limits = np.array([3, 9]), np.array([10, 20])
    np.testing.assert_allclose(seq_mean_token_sum(tokens, limits), [1 / 2, 1 / 2])
    np.testing.assert_allclose(seq_mean_token_mean(tokens, limits), [1 / 6, 1 / 18])
    np.testing.assert_allclose(seq_mean_token_sum_norm(tokens, limits), [1 / 20, 1 / 40])
