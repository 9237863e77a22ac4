from __future__ import annotations

import json

import numpy
import pytest

from rljob.api.rewards import NotScored, Parts, batch
from rljob.protocol.score_messages import Score, ScoreItem
from rljob.rewards.evaluate import RewardEvaluator

ITEM = ScoreItem("g0.0", "sums", "1+1=\n", "2", "stop", {"answer": "2"})


def evaluate(reward, name, item):
    return RewardEvaluator(reward, name)(item)


def test_a_reward_gets_the_fields_it_names():
    def reward(completion, problem, prompt, other=1):
        return float((prompt, completion, problem["answer"], other) == ("1+1=\n", "2", "2", 1))

    assert evaluate(reward, "right", ITEM) == Score("g0.0", 1.0, {}, "")


def test_a_reward_with_variable_keywords_gets_all_fields():
    def reward(*, completion, **rest):
        ids = ["response_token_ids", "response_tokens"]
        return float(sorted(rest) == ["finish", "metadata", "problem", "prompt", *ids, "task", "turns"])

    assert evaluate(reward, "right", ITEM).reward == 1.0


@pytest.mark.parametrize(
    "reward, error",
    [
        (lambda text: 1.0, "reward mine asks for 'text'; there are prompt, completion, finish, problem, task, "),
        (lambda text, **_: 1.0, "reward mine asks for 'text'; there are prompt, completion, finish, problem, task, "),
        (lambda completion, /: 1.0, "reward mine asks for 'completion'; there are prompt"),
    ],
)
def test_a_function_that_cannot_be_a_reward_is_refused_before_it_is_called(reward, error):
    with pytest.raises(ValueError) as refused:
        RewardEvaluator(reward, "mine")
    assert str(refused.value).startswith(error)


def test_numbers_beside_the_reward_become_metrics():
    assert evaluate(lambda **_: (1, {"partial": 0.5}), "r", ITEM) == Score("g0.0", 1.0, {"partial": 0.5}, "")


@pytest.mark.parametrize("answer", [0.25, numpy.float32(0.25), (numpy.float64(0.25), {"more": numpy.int64(1)})])
def test_numbers_of_any_library_are_accepted(answer):
    assert evaluate(lambda **_: answer, "r", ITEM).reward == 0.25


@pytest.mark.parametrize(
    "answer, error",
    [
        (float("nan"), "returned nan as reward"),
        (float("inf"), "returned inf as reward"),
        (10**400, "as reward"),
        (-1.7e308, "returned -1.7e+308 as reward"),
        ((1.0, {"large": 1e31}), "returned 1e+31 as large"),
        ("1.0", "returned '1.0' as reward"),
        (None, "returned None: it did not score the sample"),
        ([1.0], "returned [1.0] as reward"),
        ({"reward": 1.0}, "returned {'reward': 1.0} as reward"),
        (("7", {"reward": 0.0}), "returned '7' as reward"),
        ((float("nan"), {"reward": 1.0}), "returned nan as reward"),
        ((1.0, 2.0), "returned (1.0, 2.0) as reward"),
        ((float("nan"), {}), "returned nan as reward"),
        ((1.0, {"partial": float("nan")}), "returned nan as partial"),
    ],
)
def test_a_result_that_is_not_finite_is_an_error_of_the_sample(answer, error):
    score = evaluate(lambda **_: answer, "mine", ITEM)
    assert score.error.startswith("reward mine returned") and error in score.error
    assert score.reward == 0.0 and score.metrics == {}


class _Mute(Exception):
    def __str__(self):
        raise ValueError("no text")


class _NoNumber:
    def __float__(self):
        raise RuntimeError("no number")

    def __repr__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize("answer", [_NoNumber(), (1.0, {"a": _NoNumber()})])
def test_an_object_that_raises_is_an_error_of_the_sample(answer):
    assert evaluate(lambda **_: answer, "mine", ITEM).error == "reward mine raised RuntimeError: no number"


def test_an_exception_without_text_is_an_error_of_the_sample():
    def raises(completion):
        raise _Mute

    assert evaluate(raises, "mine", ITEM).error == "reward mine raised _Mute"


def test_the_text_of_an_error_can_be_sent_and_is_cut():
    def raises(completion):
        raise ValueError("\ud800" + "x" * 5000)

    error = evaluate(raises, "mine", ITEM).error
    assert error.startswith("reward mine raised ValueError: \\ud800xxx") and error.encode() and len(error) < 1010


def test_an_exception_is_an_error_of_the_sample():
    score = evaluate(lambda **_: json.loads("{"), "mine", ITEM)
    assert score.error.startswith("reward mine raised JSONDecodeError: Expecting")


def test_parts_are_added_with_their_weights_and_become_metrics():
    parts = Parts({"right": 1, "short": 0.5}, {"short": -0.2}, {"words": 3})
    assert evaluate(lambda **_: parts, "r", ITEM) == Score(
        "g0.0", 0.9, {"reward/right": 1.0, "reward/short": 0.5, "words": 3.0}, ""
    )


def test_a_weight_without_a_part_is_an_error_of_the_sample():
    error = evaluate(lambda **_: Parts({"a": 1.0}, {"b": 1.0}), "mine", ITEM).error
    assert error == "reward mine raised ValueError: weights name 'b', which is not one of the parts a"


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        (({},), "the reward has no parts; give one, or return NotScored"),
        (({"a": 1.0}, {}, {"reward/a": 2.0}), "the metric 'reward/a' is the part 'a'; give the metric another name"),
    ],
)
def test_parts_that_have_no_meaning_are_an_error_of_the_sample(parts, sentence):
    assert evaluate(lambda **_: Parts(*parts), "mine", ITEM).error == f"reward mine raised ValueError: {sentence}"


def test_the_class_not_scored_is_not_scored_without_a_reason():
    assert evaluate(lambda **_: NotScored, "mine", ITEM).error == "reward mine did not score the sample: "


def _yields(completion):
    yield 1.0


async def _yields_async(completion):
    yield 1.0


class _Yields:
    def __call__(self, completion):
        yield 1.0


@pytest.mark.parametrize("scorer", [_yields, _yields_async, _Yields()], ids=["function", "async", "object"])
def test_a_generator_is_no_reward(scorer):
    with pytest.raises(ValueError, match="reward mine is a generator; return the score instead of yielding it"):
        RewardEvaluator(scorer, "mine")


def test_an_async_batch_is_no_generator():
    with pytest.raises(ValueError, match="reward mine is a generator"):
        RewardEvaluator(batch(_yields_async), "mine")


def test_a_batch_may_be_a_generator():
    @batch
    def each(completion):
        yield from map(float, completion)

    assert evaluate(each, "mine", ITEM).reward == 2.0


@pytest.mark.parametrize("value", [float("nan"), None, "1"])
def test_a_part_that_is_no_number_is_an_error_of_the_sample(value):
    assert evaluate(lambda **_: Parts({"a": value}), "mine", ITEM).error.startswith("reward mine returned ")


def _raises(completion):
    raise NotScored("the row has no answer")


@pytest.mark.parametrize("reward", [_raises, lambda **_: NotScored("the row has no answer")])
def test_a_sample_that_is_not_scored_is_an_error_with_the_reason(reward):
    assert evaluate(reward, "mine", ITEM) == Score(
        "g0.0", 0.0, {}, "reward mine did not score the sample: the row has no answer"
    )
