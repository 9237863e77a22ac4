"""Advantages: published values, independent references in NumPy, and properties for any rewards."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rljob.api.algorithm import Algorithm
from rljob.api.algorithm_presets import KNOWN_FROM_SCALARS, NEEDS_ALL_SAMPLES, ZERO_FOR_ONE_SAMPLE, fill
from rljob.api.extensions import ADVANTAGES, OBJECTIVES, load
from rljob.protocol.batch_samples import BatchSample, Segment
from rljob.trainer.algorithms.advantages.base import AdvantageInputs, ScalarEstimator
from rljob.trainer.algorithms.objectives.base import is_zero_without_advantage
from rljob.trainer.algorithms.rewards import token_rewards
from rljob.trainer.batch import Row
from rljob.trainer.process_group import World

ANCHOR = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
BASELINES = {"g": 0.25, "g0": 0.1, "g1": -0.5, "g2": 1.0}
"""Group → reward of its greedy answer; 0 in others."""
OF_GROUPS = ("group_normalized", "group_centered", "rloo", "reward", "opo")
WORLD = World(0, 1, torch.device("cpu"), None, dp_rank=0, dp_size=1)
rewards = st.lists(st.floats(-100, 100), min_size=2, max_size=12)


def inputs(
    values: list[float], groups: list[str], lengths: list[int] | None = None, **fields: object
) -> AdvantageInputs:
    """Return a batch whose rows are all local: a prompt of two tokens, then the model's."""
    lengths = lengths or [1] * len(values)
    samples = [
        BatchSample(
            f"{group}.{i}", group, reward, 2, length, 2 + length, 0, 1.0, 100, baseline=BASELINES.get(group, 0.0)
        )
        for i, (group, reward, length) in enumerate(zip(groups, values, lengths, strict=True))
    ]
    rows, of_tokens = {}, {}
    for i, sample in enumerate(samples):
        mask = np.arange(sample.total_tokens) >= 2
        of_tokens[i] = token_rewards([Segment("model", 2, len(mask), sample.reward)], mask)
        rows[i] = Row(np.zeros(len(mask), np.int64), np.zeros(len(mask), np.float32), mask, of_tokens[i])
    algorithm = Algorithm.model_validate(fields)
    fill(algorithm)
    worthless = {i: np.zeros(len(row.mask_L), np.float32) for i, row in rows.items()}
    scores: Any = SimpleNamespace(values_by_row=lambda: worthless)
    return AdvantageInputs(0, samples, rows, of_tokens, scores, WORLD, algorithm)


def advantages(kind: str, values: list[float], groups: list[str], lengths: list[int] | None = None) -> np.ndarray:
    """Return the advantage of each sample; all tokens of a sample have one."""
    made = inputs(values, groups, lengths, advantage=kind)
    found = load(ADVANTAGES, kind, "")(made)
    for i, row in made.rows.items():
        assert found[i].shape == row.mask_L.shape and len(set(found[i][row.mask_L].tolist())) == 1
    return np.array([found[i][2] for i in made.rows])


@pytest.mark.parametrize(
    ("kind", "positive", "negative"),
    [
        ("group_normalized", 1.207612, -0.724567),
        ("group_centered", 0.625, -0.375),
        ("rloo", 0.714286, -0.428571),
        ("reward", 1, 0),
        ("opo", 0.625, -0.375),  # of equal lengths
        ("lite_ppo", 1.207612, -0.724567),  # of one group
        ("reinforce_pp", 1.207615, -0.724569),  # of equal lengths; the epsilon is in the root
        ("reinforce_pp_baseline", 1.207615, -0.724569),
        ("turn_return", 1, 0),
        ("gigpo", 1.207612, -0.724567),  # without states
        ("remax", 0.75, -0.25),  # the greedy answer has 0.25
    ],
)
def test_advantages_equal_the_published_anchor(kind, positive, negative):
    expected = [positive if reward else negative for reward in ANCHOR]
    np.testing.assert_allclose(advantages(kind, ANCHOR, ["g"] * 8), expected, atol=5e-7)


def baseline(kind: str, rewards: np.ndarray, members: list[int], i: int, lengths: list[int], group: str) -> float:
    """Return what an advantage subtracts from the reward of sample i."""
    if kind in ("reward", "reinforce_pp", "turn_return", "gae"):  # values are 0
        return 0.0
    if kind == "zero":
        return float(rewards[i])
    if kind == "remax":
        return BASELINES.get(group, 0.0)
    if kind == "rloo":
        return float(np.mean([rewards[k] for k in members if k != i]))
    if kind == "opo":
        return sum(lengths[k] * rewards[k] for k in members) / sum(lengths[k] for k in members)
    return float(np.mean(rewards[members]))


def reference(kind: str, values: list[float], groups: list[str], lengths: list[int]) -> list[float]:
    """Return the advantages of samples with one turn, sample by sample, from the definitions."""
    rewards, result = np.array(values), []
    for i, group in enumerate(groups):
        members = [k for k, other in enumerate(groups) if other == group]
        scale = {"group_normalized": rewards[members], "gigpo": rewards[members], "lite_ppo": rewards}.get(kind)
        divisor = 1.0 if scale is None else np.std(scale, ddof=1) + 1e-6
        result.append((rewards[i] - baseline(kind, rewards, members, i, lengths, group)) / divisor)
    if kind.startswith("reinforce_pp"):  # whitened over tokens
        tokens = np.repeat(result, lengths)
        return list((np.array(result) - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8))
    return result


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_advantages_equal_a_reference_for_mixed_groups_and_lengths(kind):
    generator = np.random.default_rng(1)
    values, lengths = generator.normal(size=12).tolist(), generator.integers(1, 30, 12).tolist()
    groups = [f"g{n}" for n in generator.permutation([0] * 5 + [1] * 4 + [2] * 3)]
    expected = reference(kind, values, groups, lengths)
    np.testing.assert_allclose(advantages(kind, values, groups, lengths), expected, rtol=1e-12, atol=1e-12)


def test_a_group_of_one_keeps_its_reward_when_normalized_and_is_zero_when_centered():
    assert advantages("group_normalized", [0.7], ["g"]) == [0.7]
    assert advantages("group_centered", [0.7], ["g"]) == [0.0]


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_the_manifest_knows_which_advantages_are_zero_for_a_group_of_one(kind):
    found = advantages(kind, [0.7, 0.2, 0.1], ["a", "b", "c"])
    assert (found.tolist() == [0.0] * 3) == (kind in (*ZERO_FOR_ONE_SAMPLE, "zero"))


def episodes(seed: int, **fields: object) -> AdvantageInputs:
    """Return episodes of one to four turns of two tokens, with a token of an observation between, in three groups that
    visit five states; one turn has no state."""
    generator = np.random.default_rng(seed)
    samples, rows, of_tokens = [], {}, {}
    for i in range(12):
        turns = int(generator.integers(1, 5))
        values = generator.normal(size=turns).tolist()
        segments = [Segment("model", 2 + 3 * turn, 4 + 3 * turn, values[turn]) for turn in range(turns)]
        mask = np.zeros(1 + 3 * turns, np.bool_)
        for segment in segments:
            mask[segment.start : segment.end] = True
        states = [str(state) if state else "" for state in generator.integers(0, 6, turns)]
        sample = BatchSample(f"{i}", f"g{i % 3}", sum(values), 2, 2 * turns, len(mask), 0, 1.0, 100)
        samples.append(msgspec.structs.replace(sample, turn_rewards=values, turn_states=states))
        of_tokens[i] = token_rewards(segments, mask)
        ends = tuple(segment.end for segment in segments[:-1])
        zeros = np.zeros(len(mask), np.float32)
        rows[i] = Row(zeros.astype(np.int64), zeros, mask, of_tokens[i], ends)
    algorithm = Algorithm.model_validate({"preset": "gigpo", **fields})
    fill(algorithm)
    scores: Any = None
    return AdvantageInputs(0, samples, rows, of_tokens, scores, WORLD, algorithm)


def gigpo_reference(samples: list[BatchSample], discount: float, coefficient: float) -> list[list[float]]:
    """Return the advantage of each turn from the definition, pair by pair."""
    found = []
    for sample in samples:
        group = [other for other in samples if other.group == sample.group]
        of_group = np.array([other.reward for other in group])
        episode = (sample.reward - of_group.mean()) / (of_group.std(ddof=1) + 1e-6)
        advantages = []
        for turn, state in enumerate(sample.turn_states):
            same = [
                sum(discount**k * reward for k, reward in enumerate(other.turn_rewards[t:]))
                for other in group
                for t, there in enumerate(other.turn_states)
                if there == state and state
            ]
            own = sum(discount**k * reward for k, reward in enumerate(sample.turn_rewards[turn:]))
            step = (own - np.mean(same)) / (np.std(same, ddof=1) + 1e-6) if len(same) > 1 else 0.0
            advantages.append(episode + coefficient * step)
        found.append(advantages)
    return found


@pytest.mark.parametrize("fields", [{}, {"discount": 0.5, "stepCoefficient": 0.3}])
def test_gigpo_equals_a_reference_for_steps_from_equal_states(fields):
    for seed in range(5):
        made = episodes(seed, **fields)
        found = load(ADVANTAGES, "gigpo", "")(made)
        expected = gigpo_reference(list(made.samples), fields.get("discount", 0.95), fields.get("stepCoefficient", 1.0))
        for i, row in made.rows.items():
            each = np.repeat(expected[i], 2)
            np.testing.assert_allclose(found[i][row.mask_L], each, rtol=1e-12, atol=1e-12)


def test_gigpo_counts_a_change_of_the_reward_for_the_last_step_and_ignores_states_of_branches():
    made = episodes(1)
    samples = [msgspec.structs.replace(sample, reward=sample.reward + i) for i, sample in enumerate(made.samples)]
    changed = [
        msgspec.structs.replace(sample, turn_rewards=[*sample.turn_rewards[:-1], sample.turn_rewards[-1] + i])
        for i, sample in enumerate(samples)
    ]
    of_changed = load(ADVANTAGES, "gigpo", "")(dataclasses.replace(made, samples=changed))
    for i, found in load(ADVANTAGES, "gigpo", "")(dataclasses.replace(made, samples=samples)).items():
        np.testing.assert_allclose(found, of_changed[i], atol=1e-12)
    branched = [msgspec.structs.replace(sample, sequences=[1, 1]) for sample in made.samples]
    of_episodes = load(ADVANTAGES, "group_normalized", "")(made)
    for i, found in load(ADVANTAGES, "gigpo", "")(dataclasses.replace(made, samples=branched)).items():
        np.testing.assert_array_equal(found, of_episodes[i])


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_the_manifest_knows_which_advantages_follow_from_scalars(kind):
    assert isinstance(load(ADVANTAGES, kind, ""), ScalarEstimator) == (kind in KNOWN_FROM_SCALARS)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_manifest_knows_which_objectives_need_all_samples(objective):
    function = load(OBJECTIVES, objective, "")
    assert is_zero_without_advantage(function) == (objective not in NEEDS_ALL_SAMPLES)


@pytest.mark.parametrize("kind", [kind for kind in ADVANTAGES if kind not in ("reward", "turn_return", "gae", "remax")])
def test_a_constant_group_has_no_advantage(kind):
    np.testing.assert_allclose(advantages(kind, [0.1] * 7, ["g"] * 7), 0, atol=1e-9)


@pytest.mark.parametrize("kind", OF_GROUPS)
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
    """Mistake 2: a deviation without its mean gives another shape."""
    values = advantages("group_normalized", rewards, ["g"] * len(rewards))
    assert values.shape == (len(rewards),)
    assert abs(values.mean()) < 1e-6
    assert values.std(ddof=1) <= 1 + 1e-9


def two_turns(discount: float) -> AdvantageInputs:
    """Return a sample of two turns of two and three tokens, with rewards 0.25 and 1 and an observation between them."""
    made = inputs([1.25], ["g"], [5], advantage="turn_return", discount=discount)
    mask = np.array([False, False, True, True, False, True, True, True, False])
    rewards_L = token_rewards([Segment("model", 2, 4, 0.25), Segment("model", 5, 8, 1.0)], mask)
    made.rows[0] = Row(np.zeros(9, np.int64), np.zeros(9, np.float32), mask, rewards_L, (4,))
    made.rewards[0] = rewards_L
    return made


def test_rewards_of_later_turns_reach_earlier_turns():
    """Mistake 6: returns that are reset at observation tokens."""
    made = two_turns(0.5)
    found = load(ADVANTAGES, "turn_return", "")(made)[0]
    np.testing.assert_allclose(found[made.rows[0].mask_L], [0.75, 0.75, 1, 1, 1])
    returns = np.array([0.5**4 + 0.125, 0.5**3 + 0.25, 0.25, 0.5, 1])  # a token is one step, an observation none
    expected = (returns - returns.mean()) / np.sqrt(returns.var(ddof=1) + 1e-8)
    found = load(ADVANTAGES, "reinforce_pp", "")(made)[0]
    np.testing.assert_allclose(found[made.rows[0].mask_L], expected, rtol=1e-12)
