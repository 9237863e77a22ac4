from __future__ import annotations

import json

import numpy
import pytest

from rljob.protocol.rewards import Score, ScoreItem
from rljob.rewards.sdk import judge

ITEM = ScoreItem("g0.0", "sums", "1+1=\n", "2", "stop", {"answer": "2"})


def test_a_reward_gets_the_fields_it_names():
    def reward(*, prompt, completion, problem, **_):
        return float((prompt, completion, problem["answer"]) == ("1+1=\n", "2", "2"))

    assert judge(reward, "right", ITEM) == Score("g0.0", 1.0, {}, "")


def test_numbers_beside_the_reward_become_metrics():
    assert judge(lambda **_: {"reward": 1, "partial": 0.5}, "r", ITEM) == Score("g0.0", 1.0, {"partial": 0.5}, "")


@pytest.mark.parametrize("answer", [0.25, numpy.float32(0.25), {"reward": numpy.float64(0.25)}])
def test_numbers_of_any_library_are_taken(answer):
    assert judge(lambda **_: answer, "r", ITEM).reward == 0.25


@pytest.mark.parametrize(
    "answer, told",
    [
        (float("nan"), "answered nan as reward"),
        (float("inf"), "answered inf as reward"),
        (10**400, "as reward"),
        ("1.0", "answered '1.0' as reward"),
        (None, "answered None as reward"),
        ([1.0], "answered [1.0] as reward"),
        ({}, "answered None as reward"),
        ({"partial": 1.0}, "answered None as reward"),
        ({"reward": 1.0, "partial": float("nan")}, "answered nan as partial"),
    ],
)
def test_what_is_no_finite_number_is_an_error_of_the_sample(answer, told):
    score = judge(lambda **_: answer, "mine", ITEM)
    assert score.error.startswith("reward mine answered") and told in score.error
    assert score.reward == 0.0 and score.metrics == {}


def test_an_exception_is_an_error_of_the_sample():
    score = judge(lambda **_: json.loads("{"), "mine", ITEM)
    assert score.error.startswith("reward mine raised JSONDecodeError: Expecting")
