"""pass@k and the other metrics of an evaluation."""

import itertools
import json

import pytest

from rljob.api.job_status import PassRate
from rljob.api.tasks import Evaluation
from rljob.ledger.evaluation_results import (
    evaluation_result,
    mean_pass_at,
    metrics_of,
    over_tasks,
    pass_at_k,
    pass_rates_agree,
)

SETTINGS = Evaluation.model_validate({"samplesPerProblem": 4, "passAt": [1, 2, 4], "passReward": 0.5})


@pytest.mark.parametrize("samples", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_subsets_with_an_answer_that_passes(samples):
    for passed, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        subsets = list(itertools.combinations(range(samples), k))
        expected = sum(any(answer < passed for answer in subset) for subset in subsets) / len(subsets)
        assert pass_at_k(samples, passed, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_of_many_samples_is_finite_and_between_0_and_1():
    assert pass_at_k(1024, 1, 512) == pytest.approx(0.5)
    assert pass_at_k(1024, 513, 512) == 1.0


def test_a_result_counts_answers_by_problem():
    problems = [[1.0, 0.5, 0.0, None], [0.0, 0.0, 0.0, 0.25], [1.0, 1.0, 1.0, 1.0]]
    result = evaluation_result(3, "sums", problems, SETTINGS, "no")
    assert (result.problems, result.samples_per_problem, result.samples) == (3, 4, 12)
    assert (result.failed, result.failure) == (1, "no")
    assert result.accuracy == 6 / 12
    assert result.mean_reward == 5.75 / 12
    at_2 = (1 - 1 / 6 + 0 + 1) / 3  # of the first problem two of four answers pass: C(2, 2) / C(4, 2) = 1 / 6
    assert [(rate.k, rate.value) for rate in result.pass_at] == [
        (1, pytest.approx(0.5)), (2, pytest.approx(at_2)), (4, pytest.approx(2 / 3)),
    ]  # fmt: skip


def test_an_answer_that_failed_does_not_pass_even_if_0_passes():
    settings = Evaluation.model_validate({"passReward": 0, "passAt": [1]})
    result = evaluation_result(0, "sums", [[None], [0.0]], settings, "no")
    assert (result.accuracy, result.pass_at) == (0.5, [PassRate(1, 0.5)])


def test_the_result_over_tasks_is_that_of_all_their_problems():
    first = evaluation_result(2, "a", [[1.0, 0.0, 0.0, 0.0]], SETTINGS, "")
    second = evaluation_result(2, "b", [[1.0] * 4, [None] * 4, [0.0] * 4], SETTINGS, "no")
    both = evaluation_result(2, "", [[1.0, 0.0, 0.0, 0.0], [1.0] * 4, [None] * 4, [0.0] * 4], SETTINGS, "")
    assert metrics_of(over_tasks([first, second])) == pytest.approx(metrics_of(both))
    assert metrics_of(both) == pytest.approx({
        "evaluation/accuracy": 5 / 16, "evaluation/mean_reward": 5 / 16, "evaluation/problems": 4,
        "evaluation/samples": 16, "evaluation/failed": 4, "evaluation/pass@1": 5 / 16,
        "evaluation/pass@2": (0.5 + 1) / 4, "evaluation/pass@4": 0.5,
    })  # fmt: skip
    assert metrics_of(first)["evaluation/a/pass@2"] == 0.5


def test_recorded_rates_are_compared_with_the_answers():
    passed, ks = [2, 0, 4], [1, 2]
    rates = {k: mean_pass_at(4, passed, k) for k in ks}

    def agree(recorded=None, counts=None, samples=4, pass_at=ks):
        return pass_rates_agree(
            json.dumps(rates if recorded is None else recorded),
            json.dumps(passed if counts is None else counts),
            samples,
            json.dumps(pass_at),
        )

    assert agree()
    assert not agree(recorded={**rates, 2: rates[2] + 1e-6})
    assert not agree(recorded={1: rates[1]})
    assert not agree(recorded=[])
    assert not agree(counts=[1, 0, 4])
    assert not agree(counts=[])
    assert not agree(counts=[5, 0, 4])
    assert not agree(pass_at=[1, 4])
    assert not pass_rates_agree(None, "[]", 4, "[1]")
