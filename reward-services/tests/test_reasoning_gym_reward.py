from __future__ import annotations

import pytest
from reasoning_gym.factory import create_dataset

from rljob.api.rewards import NoOptions
from rljob.api.tasks import Task
from rljob.rewards.reasoning_gym_reward import ReasoningGymReward


def task(dataset: str, **config: object) -> Task:
    data = {"reasoningGym": {"dataset": dataset, "config": config}}
    return Task.model_validate({"name": "sums", "data": data, "reward": "sums"})


@pytest.fixture(scope="module")
def reward():
    return ReasoningGymReward(NoOptions(), [task("chain_sum", max_terms=3)])


@pytest.mark.parametrize(
    "completion, expected",
    [
        ("2-3=-1;-1+7=6;<answer>6</answer>", (1.0, 1.0)),
        ("<answer> 6.0 </answer>", (1.0, 1.0)),
        ("<answer>5</answer> no, <answer>6</answer>", (1.0, 1.0)),
        ("<answer>5</answer>", (0.0, 0.01)),
        ("6", (0.0, 0.0)),
    ],
)
def test_only_full_marks_are_rewarded(reward, completion, expected):
    problem = {"question": "2 - 3 + 7 =", "answer": "6", "metadata": {"source_dataset": "chain_sum"}}
    score, metrics = reward(completion=completion, problem=problem, task="sums")
    assert (score, metrics["partial"]) == (expected[0], pytest.approx(expected[1], abs=0.05))


def test_the_dataset_scores_with_the_config_of_the_task():
    rows = create_dataset("puzzle24", seed=1, size=1, min_value=1, max_value=4)
    narrow, wide = (
        ReasoningGymReward(NoOptions(), [task("puzzle24", min_value=1, max_value=high)]) for high in (4, 10)
    )
    problem = {**rows[0], "metadata": {**rows[0]["metadata"], "numbers": [8, 3, 1, 1]}}
    kwargs = {"completion": "<answer>8*3*1*1</answer>", "problem": problem, "task": "sums"}
    assert narrow(**kwargs) != wide(**kwargs)
