"""The examples of docs/rewards.md: each line of a block `json examples=NAME` is a scored sample."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest

from e2e.docs.blocks import blocks
from rljob.api.extensions import load
from rljob.api.rewards import REWARDS
from rljob.api.tasks import Task
from rljob.protocol.score_messages import ScoreItem
from rljob.rewards.chat_api import ChatApi
from rljob.rewards.evaluate import RewardEvaluator

PAGE = Path(__file__).parents[2] / "docs" / "rewards.md"
TASK = Task.model_validate({"name": "sums", "data": {"jsonl": {"path": "a"}}, "reward": "r"})
EXAMPLES = [
    pytest.param(block.info.removeprefix("examples="), json.loads(line), id=f"{block.line + i}")
    for block in blocks(PAGE)
    if block.info.startswith("examples=")
    for i, line in enumerate(block.text.splitlines(), 1)
]


def score(name: str, example: dict):
    kind = REWARDS[name]
    evaluate = RewardEvaluator(load({}, kind.make, name)(kind.parse(example.get("config", {})), [TASK]), name)
    tokens = example.get("responseTokens")
    prompt, finish = example.get("prompt", ""), example.get("finish", "stop")
    item = ScoreItem("s", "sums", prompt, example["completion"], finish, example["row"], [], tokens)
    with mock.patch.object(ChatApi, "ask", mock.AsyncMock(side_effect=example.get("replies", []))):
        found = evaluate(item)
    if evaluate._runner is not None:  # of an async reward, for the life of a worker
        evaluate._runner.close()
    return found


@pytest.mark.parametrize(("name", "example"), EXAMPLES)
def test_an_example_has_the_reward_of_the_page(name: str, example: dict) -> None:
    found = score(name, example)
    if "error" in example:
        assert example["error"] in found.error
        return
    assert (found.error, found.reward) == ("", pytest.approx(example["reward"]))
    assert found.metrics.items() >= example.get("metrics", {}).items()


def test_the_page_has_examples_of_every_built_in_reward() -> None:
    shown = {example.values[0] for example in EXAMPLES}
    elsewhere = {"reasoning_gym", "code", "reward_model"}  # with own data; with a page of its own; with a model
    assert shown == set(REWARDS) - elsewhere
