"""The rewards of turns: their sum, and invalid rewards."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob.protocol.score_messages import add_up, credit_turns

FINITE = st.floats(-1e6, 1e6)


@pytest.mark.parametrize(
    ("turns", "reward", "given_rewards", "credited"),
    [
        (1, 0.1, [], [0.1]),
        (3, 0.1, [], [0.0, 0.0, 0.1]),
        (3, 1.0, [0.25], [0.25, 0.0, 0.75]),
        (2, 1.0, [0.25, 0.75], [0.25, 0.75]),
        (2, 1.0, [0.25, 0.5], [0.25, 0.75]),
        (2, -1.0, [1], [1.0, -2.0]),
    ],
)
def test_the_last_turn_gets_the_rest_of_the_reward(
    turns: int, reward: float, given_rewards: list[float], credited: list[float]
) -> None:
    assert credit_turns(turns, reward, given_rewards) == credited


@given(st.integers(1, 5), FINITE, st.lists(FINITE, max_size=5))
def test_rewards_add_up_and_are_the_same_when_they_are_credited_again(
    turns: int, reward: float, given_rewards: list[float]
) -> None:
    credited = credit_turns(turns, reward, given_rewards[:turns])
    assert len(credited) == turns
    assert add_up(credited, reward)
    assert credit_turns(turns, reward, credited) == pytest.approx(credited, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("first", [-0.4, 0.1, 1e12, -3e9])
def test_a_sum_that_differs_by_rounding_is_the_reward(first: float) -> None:
    assert add_up(credit_turns(2, 1.0, [first]), 1.0)
    assert add_up([first, 0.7 - first], 0.7)


@pytest.mark.parametrize("turn_rewards", [[0.5, 0.6], [1.0 + 1e-6], [], [math.nan], [math.inf, 1.0], [1e308, 1e308]])
def test_a_sum_that_is_not_the_reward_is_found(turn_rewards: list[float]) -> None:
    assert not add_up(turn_rewards, 1.0)


@pytest.mark.parametrize(
    ("turns", "reward", "given_rewards", "sentence"),
    [
        (0, 1.0, [], "no turn was generated"),
        (1, math.nan, [], "its reward is nan"),
        (2, 1.0, [0.0, math.inf], "the reward of turn 1 is inf"),
        (2, 1.0, [0.0, 0.0, 0.0], "rewards of 3 turns, but 2 turns"),
        (1, 1e31, [], "its reward is 1e\\+31"),
        (2, 1.0, [-1e31], "the reward of turn 0 is -1e\\+31"),
        (3, 1.0, [1e30, 1e30], "the reward of its last turn is -2e\\+30"),
    ],
)
def test_invalid_rewards_are_refused_in_one_sentence(
    turns: int, reward: float, given_rewards: list[float], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        credit_turns(turns, reward, given_rewards)
