"""Selections of tokens: their order, equal values, and replicas of several ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from rljob.api.algorithm import Algorithm
from rljob.trainer.algorithms.token_selection import SelectionInputs, covariances, first_tokens
from rljob.trainer.select_tokens import token_keys


@dataclass(frozen=True)
class Ranks:
    """The collectives of a rank, beside ranks whose arrays are known."""

    others: tuple[Any, ...] = ()
    sums: float = 0.0
    device: str = "cpu"

    def gather(self, value: Any) -> list[Any]:
        return [value, *self.others]

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.sums


def inputs_of(advantages: Any, logprobs: Any, world: Any = None) -> SelectionInputs:
    advantages_T = np.array(advantages, np.float64)
    keys_T = np.linspace(0.9, 0.1, len(advantages_T))
    samples_T, none_T = np.arange(len(advantages_T)), np.zeros(len(advantages_T))
    old_T = np.array(logprobs, np.float64)
    world = world or Ranks()
    return SelectionInputs(samples_T, len(samples_T), advantages_T, old_T, none_T, keys_T, world, Algorithm())


def test_covariances_have_the_covariance_as_their_mean():
    advantages, logprobs = np.random.default_rng(0).normal(size=(2, 50))
    found = covariances(inputs_of(advantages, logprobs))
    assert found.mean() == pytest.approx(np.cov(advantages, logprobs, bias=True)[0, 1], rel=1e-12)
    assert len(covariances(inputs_of([], []))) == 0, "a rank, or a batch, without tokens"


@pytest.mark.parametrize(("count", "expected"), [(1, [2]), (2, [2, 3]), (3, [1, 2, 3]), (9, [0, 1, 2, 3])])
def test_the_first_tokens_have_the_largest_scores_and_equal_ones_the_smallest_keys(count, expected):
    inputs = inputs_of([0] * 5, [0] * 5)
    allowed = np.array([True, True, True, True, False])
    found = first_tokens(inputs, np.array([1.0, 1.0, 2.0, 1.0, 9.0]), allowed, count)
    assert np.flatnonzero(found).tolist() == expected


def test_tokens_of_other_ranks_take_places_and_those_of_a_rank_of_the_same_replica_do_not():
    inputs, scores, everywhere = inputs_of([0] * 4, [0] * 4), np.array([4.0, 3.0, 2.0, 1.0]), np.ones(4, np.bool_)
    same = (scores, inputs.keys_T)
    beside = replace(inputs, world=Ranks((same,)))
    assert first_tokens(beside, scores, everywhere, 2).tolist() == [True, True, False, False]
    better = (np.array([9.0, 3.5]), np.array([0.51, 0.52]))
    other = replace(inputs, world=Ranks((same, better)))
    assert first_tokens(other, scores, everywhere, 3).tolist() == [True, False, False, False]
    empty = replace(inputs_of([], []), world=Ranks((better,)))
    assert first_tokens(empty, np.zeros(0), np.zeros(0, np.bool_), 3).tolist() == []


def test_totals_and_shares_count_the_tokens_of_all_ranks():
    inputs = inputs_of([1.0, 2.0], [0.0, 0.0], Ranks(sums=10.0))
    assert inputs.totals([inputs.advantages_T]) == [23.0]
    assert [inputs.number(share) for share in (1e-4, 0.1, 0.5, 1)] == [1, 2, 11, 22]


def test_the_key_of_a_token_follows_from_step_sample_and_place_alone():
    keys = token_keys(3, "12.0", 8)
    assert token_keys(3, "12.0", 5).tolist() == keys[:5].tolist()
    others = np.concatenate([keys, token_keys(4, "12.0", 8), token_keys(3, "12.1", 8), token_keys(3, "1.20", 8)])
    assert len(set(others.tolist())) == 32 and (others >= 0).all() and (others < 1).all()
