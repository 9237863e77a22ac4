"""The built-in environment `reasoning_gym`, with the real package."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

import pytest

from rljob.api.models import RLJobSpec
from rljob.api.roles import Environment
from rljob.environments.environment_service import make_factory
from rljob.environments.main import function_problems
from rljob.environments.self_check import examine

ROW = {"question": "2 - 3 + 7 =", "answer": "6", "metadata": {"source_dataset": "chain_sum"}}


def factory(dataset: str = "chain_sum", **options: Any) -> Any:
    config = {"dataset": dataset, **options}
    return make_factory(Environment(name="sums", builtin="reasoning_gym", config=config), "spec.environments[0]")


def test_the_package_has_the_version_for_which_this_is_written() -> None:
    assert version("reasoning-gym") == "0.1.25"


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("2-3=-1, <answer>6</answer>", 1.0), ("<answer>5</answer>", 0.0), ("6", 0.0), ("", 0.0)],
)
def test_one_attempt_is_right_or_wrong(answer: str, reward: float) -> None:
    problem = factory()()
    assert problem.reset(1, ROW) == ("2 - 3 + 7 =", {})
    text, got, terminated, truncated, info = problem.step(answer)
    assert (got, terminated, truncated) == (reward, bool(reward), not reward)
    assert info["metrics"]["success"] == reward and info["metrics"]["partial"] <= 1
    assert text == ("Right." if reward else "That is not right. Try again.")


def test_further_attempts_end_with_the_right_answer_or_the_last_attempt() -> None:
    problem = factory(attempts=3, wrong="No.")()
    problem.reset(1, ROW)
    assert [problem.step("<answer>5</answer>")[:4] for _ in range(2)] == [("No.", 0.0, False, False)] * 2
    assert problem.step(problem.expert())[:4] == ("Right.", 1.0, True, False)
    problem.reset(1, ROW)
    ends = [problem.step("<answer>5</answer>")[2:4] for _ in range(3)]
    assert ends == [(False, False), (False, False), (False, True)]


def test_a_row_of_another_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the row is of the dataset 'chain_sum'; name the dataset of the rows"):
        factory("basic_arithmetic")().reset(1, ROW)


def test_the_check_finds_no_defect_and_the_scripted_agent_solves_every_problem() -> None:
    found = asyncio.run(examine(factory(parameters={"max_terms": 3}), 40, 5))
    assert found["problems"] == []
    assert found["scripted"]["success"] == 1 and found["random"]["success"] == 0


def test_the_check_before_a_run_names_the_dataset_that_does_not_exist() -> None:
    entries = [
        Environment(name="lake", builtin="frozen_lake"),
        Environment(name="sums", builtin="reasoning_gym", config={"dataset": "chain_som"}),
    ]
    spec = RLJobSpec.model_construct(environments=entries)
    (problem,) = function_problems(spec)
    assert problem.startswith("spec.environments[1].config.dataset: there is no dataset 'chain_som' in reasoning-gym")
    assert list(function_problems(spec, "lake")) == []


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"dataset": "chain_som"}, r"spec.environments\[0\].config.dataset: there is no dataset 'chain_som'"),
        ({"dataset": "chain_sum", "parameters": {"max_terms": 0}}, r"\.config\.parameters: chain_sum refuses them"),
        ({"dataset": "chain_sum", "parameters": {"size": 2}}, r"\.config\.parameters: size is governed by the rows"),
        ({}, r"\.config\.dataset: "),
    ],
)
def test_wrong_options_end_the_service_with_one_sentence(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_factory(Environment(name="sums", builtin="reasoning_gym", config=config), "spec.environments[0]")
