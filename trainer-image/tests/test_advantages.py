"""Advantages: published values, and properties for any rewards."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob.api.algorithm import ZERO_FOR_ONE_SAMPLE, Algorithm
from rljob.api.extensions import ADVANTAGES, load
from rljob.protocol.messages import BatchSample
from rljob.trainer.algorithms.advantages.base import AdvantageInputs
from rljob.trainer.batch import Row

ANCHOR = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
rewards = st.lists(st.floats(-100, 100), min_size=2, max_size=12)


def advantages(kind: str, values: list[float], groups: list[str]) -> np.ndarray:
    """Return the advantage of each sample of a batch whose rows are all local; a row has one token of the model."""
    samples = [
        BatchSample(f"{group}.{i}", group, reward, 1, 1, 2, 0, 1.0, 1)
        for i, (group, reward) in enumerate(zip(groups, values, strict=True))
    ]
    row = Row(np.zeros(2, np.int64), np.zeros(2, np.float32), np.array([False, True]), np.zeros(2))
    rows = dict.fromkeys(range(len(samples)), row)
    found = load(ADVANTAGES, kind, "")(AdvantageInputs(0, samples, rows, {}, None, None, Algorithm()))
    assert all(len(found[i]) == 2 and found[i][0] == found[i][1] for i in rows)
    return np.array([found[i][1] for i in rows])


@pytest.mark.parametrize(
    ("kind", "positive", "negative"),
    [("group_normalized", 1.207612, -0.724567), ("group_centered", 0.625, -0.375)],
)
def test_advantages_equal_the_published_anchor(kind, positive, negative):
    expected = [positive if reward else negative for reward in ANCHOR]
    np.testing.assert_allclose(advantages(kind, ANCHOR, ["g"] * 8), expected, atol=5e-7)


def test_a_group_of_one_keeps_its_reward_when_normalized_and_is_zero_when_centered():
    assert advantages("group_normalized", [0.7], ["g"]) == [0.7]
    assert advantages("group_centered", [0.7], ["g"]) == [0.0]


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_the_manifest_knows_which_advantages_are_zero_for_a_group_of_one(kind):
    assert (advantages(kind, [0.7], ["g"]) == [0.0]) == (kind in ZERO_FOR_ONE_SAMPLE)


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_a_constant_group_has_no_advantage(kind):
    np.testing.assert_allclose(advantages(kind, [0.1] * 7, ["g"] * 7), 0, atol=1e-9)


@pytest.mark.parametrize("kind", ADVANTAGES)
@given(rewards=rewards, others=rewards)
def test_advantages_of_a_group_do_not_depend_on_other_groups(kind, rewards, others):
    alone = advantages(kind, rewards, ["a"] * len(rewards))
    names = ["a"] * len(rewards) + ["b"] * len(others)
    order = np.random.default_rng(0).permutation(len(names))
    both = [*rewards, *others]
    mixed = advantages(kind, [both[i] for i in order], [names[i] for i in order])
    back = np.empty(len(names))
    back[order] = mixed
    np.testing.assert_allclose(back[: len(rewards)], alone, rtol=1e-6, atol=1e-6)


@given(rewards=rewards)
def test_normalized_advantages_have_mean_zero_and_at_most_unit_deviation(rewards):
    values = advantages("group_normalized", rewards, ["g"] * len(rewards))
    assert values.shape == (len(rewards),)  # a deviation without its mean would broadcast to another shape
    assert abs(values.mean()) < 1e-6
    assert values.std(ddof=1) <= 1 + 1e-9
