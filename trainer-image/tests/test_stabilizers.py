"""Changes of rewards and advantages against NumPy, on one rank and on several."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from ranks import on_ranks

from rljob.api.algorithm import Algorithm
from rljob.api.algorithm_presets import fill
from rljob.protocol.batch_samples import BatchSample
from rljob.protocol.trainer_protocol import EarlierSteps, Train
from rljob.trainer.algorithms.stabilizers import shape_rewards, shape_tokens, stabilize, whiten
from rljob.trainer.process_group import World

ALONE = World(0, 1, torch.device("cpu"), None, dp_rank=0, dp_size=1)


def make_train(rewards: list[float], lengths: list[int], groups: str) -> Train:
    samples = [
        BatchSample(f"{i}", group, reward, 2, length, 2 + length, 0, 1.0, 10)
        for i, (reward, length, group) in enumerate(zip(rewards, lengths, groups, strict=True))
    ]
    return Train(1, 0, samples, check_initial_logprobs=False)


def algorithm(**fields: Any) -> Algorithm:
    made = Algorithm.model_validate(fields)
    fill(made)
    return made


def test_rewards_are_clipped_then_long_answers_are_punished():
    train = make_train([5.0, -5.0, 0.5, 0.5, 0.5, 0.5], [1, 1, 6, 7, 8, 10], "aabbcc")
    made = algorithm(rewardClip=2, overlongBuffer=4, overlongPenalty=3)
    found = [sample.reward for sample in shape_rewards(train, made).samples]
    np.testing.assert_allclose(found, [2, -2, 0.5, 0.5 - 0.75, 0.5 - 1.5, 0.5 - 3], rtol=1e-15)
    assert shape_rewards(train, algorithm()) is train
    assert [sample.reward for sample in train.samples][:2] == [5.0, -5.0]


def test_the_change_of_a_reward_goes_to_the_models_last_token():
    rewards, mask = np.array([0, 0.5, 0, 1.0, 0]), np.array([False, True, False, True, False])
    assert shape_tokens(rewards, mask, -2.0).tolist() == [0, 0.5, 0, -1.0, 0]
    assert shape_tokens(rewards, ~mask & False, -2.0) is rewards


def test_groups_outside_the_bounds_of_difficulty_get_no_advantage():
    train = make_train([0, 0, 0, 1, 1, 1], [1] * 6, "aabbcc")
    ones = {i: np.ones(3) for i in range(6)}
    masks = {i: np.ones(3, np.bool_) for i in range(6)}

    def kept(**fields: float) -> list[float]:
        return [float(a[0]) for a in stabilize(ones, masks, train.samples, algorithm(**fields), ALONE).values()]

    assert kept(difficultyAbove=0, difficultyBelow=1) == [0, 0, 1, 1, 0, 0]
    assert kept(difficultyAbove=0) == [0, 0, 1, 1, 1, 1]
    assert kept(difficultyBelow=1) == [1, 1, 1, 1, 0, 0]
    assert kept(advantageClip=0.5) == [0.5] * 6


def test_the_term_of_a_teacher_is_added_after_groups_are_masked_and_before_the_clip():
    train = make_train([0, 0, 0, 1, 1, 1], [1] * 6, "aabbcc")
    masks = {i: np.ones(3, np.bool_) for i in range(6)}
    terms = {i: np.array([-4.0, 0.25, i]) for i in range(6)}
    made = algorithm(difficultyAbove=0, difficultyBelow=1, advantageClip=2)
    found = stabilize({i: np.ones(3) for i in range(6)}, masks, train.samples, made, ALONE, terms)
    for i, own in found.items():
        np.testing.assert_array_equal(own, np.clip(terms[i] + (1 if i in (2, 3) else 0), -2, 2))


def made_values() -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
    generator = np.random.default_rng(2)
    values = {i: generator.normal(3, 2, 4 + i) for i in range(6)}
    masks = {i: np.arange(4 + i) >= 2 for i in range(6)}
    for i in values:
        values[i][0] = np.nan  # outside the mask
    return values, masks


def whitened(world: World, own: list[list[int]]) -> dict[int, np.ndarray]:
    values, masks = made_values()
    return whiten({i: values[i] for i in own[world.rank]}, masks, world)


@pytest.mark.parametrize("own", [[[0, 1, 2, 3, 4, 5]], [[5, 0], [3, 1, 4, 2]], [[], [0, 1, 2, 3, 4, 5], []]])
def test_whitening_is_over_the_tokens_of_all_ranks_also_of_empty_ones(own):
    """Mistake 7: statistics of a part, or a rank that takes no part."""
    values, masks = made_values()
    tokens = np.concatenate([values[i][masks[i]] for i in values])
    mean, scale = tokens.mean(), np.sqrt(tokens.var(ddof=1) + 1e-8)
    results = on_ranks(len(own), whitened, own)
    assert [sorted(result) for result in results] == [sorted(indices) for indices in own]
    for result in results:
        for i, found in result.items():
            np.testing.assert_allclose(found[masks[i]], (values[i][masks[i]] - mean) / scale, rtol=1e-12)


def test_advantages_are_clipped_after_they_are_whitened():
    values, masks = made_values()
    train = make_train([1.0] * 6, [4] * 6, "aabbcc")
    made = algorithm(whitenAdvantages=True, advantageClip=1)
    plain = whiten(values, masks, ALONE)
    found = stabilize(values, masks, train.samples, made, ALONE)
    for i in values:
        np.testing.assert_array_equal(found[i], np.clip(plain[i], -1, 1))


def test_whitening_of_one_token_is_zero():
    assert whiten({0: np.array([7.0])}, {0: np.array([True])}, ALONE)[0].tolist() == [0.0]


REWARDS = [3.0, 1.0, 2.0, 2.0, 0.0, 0.5, 9.0]
GROUPS = "aabbccd"
EARLIER = [1.0, -2.0, 4.0]


def normalized(baseline: float | None = None, **fields: Any) -> list[float]:
    train = make_train(REWARDS, [1] * len(REWARDS), GROUPS)
    mean = float(np.mean(EARLIER))
    earlier = EarlierSteps(len(EARLIER), mean, float(np.square(np.array(EARLIER) - mean).sum()))
    samples = [msgspec.structs.replace(sample, baseline=baseline) for sample in train.samples]
    shaped = shape_rewards(msgspec.structs.replace(train, earlier=earlier, samples=samples), algorithm(**fields))
    return [sample.reward if baseline is None else sample.baseline for sample in shaped.samples]


def rewards_over(kind: str, i: int) -> list[float]:
    """Return the rewards whose mean or deviation a sample has."""
    if kind == "group":
        return [reward for reward, group in zip(REWARDS, GROUPS, strict=True) if group == GROUPS[i]]
    return REWARDS if kind == "batch" else EARLIER + REWARDS


def deviation(values: list[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 and len(set(values)) > 1 else 1.0


@pytest.mark.parametrize("kind", ["group", "batch"])
def test_equal_rewards_have_no_deviation_also_if_they_are_large(kind):
    train = make_train([100000.1] * 3, [1] * 3, "aaa")
    shaped = shape_rewards(train, algorithm(rewardMean=kind, rewardStd=kind))
    assert [sample.reward for sample in shaped.samples] == pytest.approx([0.0] * 3, abs=1e-9)


@pytest.mark.parametrize("std", [None, "group", "batch", "running"])
@pytest.mark.parametrize("mean", [None, "group", "batch", "running"])
def test_rewards_are_normalized_by_mean_and_deviation_each_alone_and_together(mean, std):
    fields = {name: value for name, value in (("rewardMean", mean), ("rewardStd", std)) if value is not None}
    for given, found in ((REWARDS, normalized(**fields)), ([0.75] * 7, normalized(baseline=0.75, **fields))):
        expected = [
            (reward - (np.mean(rewards_over(mean, i)) if mean else 0)) / (deviation(rewards_over(std, i)) if std else 1)
            for i, reward in enumerate(given)
        ]
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


def test_rewards_are_clipped_after_they_are_normalized():
    assert max(normalized(rewardMean="batch", rewardClip=0.5)) == 0.5
    np.testing.assert_allclose(
        normalized(rewardMean="batch", rewardClip=0.5), np.clip(np.array(REWARDS) - np.mean(REWARDS), -0.5, 0.5)
    )
    assert normalized(baseline=0.75, rewardClip=0.5) == [0.5] * 7, "also the reward of a greedy answer"


@pytest.mark.parametrize("over", ["group", "batch"])
def test_a_deviation_by_rounding_alone_does_not_divide(over):
    train = make_train([0.1] * 3, [1] * 3, "aaa")
    assert np.std([0.1] * 3, ddof=1) > 0, "the mean of the three is not exactly 0.1"
    shaped = shape_rewards(train, algorithm(rewardMean=over, rewardStd=over))
    np.testing.assert_allclose([sample.reward for sample in shaped.samples], 0, atol=1e-15)
