"""What `rljob reward check` compares with: the reward that each service gave, not their weighted sum."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rljob.api.roles import Reward
from rljob.api.tasks import Task
from rljob.protocol.score_messages import ScoreItem
from rljob.runner.recorded_samples import recorded_rewards

REWARDS = [Reward(name=name, builtin="math") for name in ("right", "far", "near")]
MORE = {"moreRewards": [{"name": "far", "weight": 0.5}]}


def recorded(
    reward: float | None, metrics: dict[str, float], row: dict[str, Any], fields: dict[str, Any]
) -> dict[str, float]:
    task = Task.model_validate({"name": "sums", "data": {"jsonl": {"path": "a"}}} | fields)
    item = ScoreItem("g0.0", "sums", "", "4", "stop", row)
    detail: Any = SimpleNamespace(sample=SimpleNamespace(reward=reward), metrics=metrics)
    return recorded_rewards([task], [reward.name for reward in REWARDS], item, detail)


@pytest.mark.parametrize(
    ("reward", "metrics", "row", "fields", "found"),
    [
        pytest.param(0.5, {}, {}, {"reward": "right"}, {"right": 0.5}, id="one reward"),
        pytest.param(0.5, {"reward/far": 9.0}, {}, {"reward": "right"}, {"right": 0.5}, id="a part of its own"),
        pytest.param(None, {}, {}, {"reward": "right"}, {}, id="not scored"),
        pytest.param(0.5, {}, {"by": "near"}, {"reward": "right", "rewardColumn": "by"}, {"near": 0.5}, id="by row"),
        pytest.param(0.5, {}, {}, {"rewardColumn": "by"}, {}, id="a row without a reward"),
        pytest.param(
            1.0,
            {"reward/right": 0.75, "reward/far": 0.5, "far/reward/near": 3.0},
            {},
            {"reward": "right"} | MORE,
            {"right": 0.75, "far": 0.5},
            id="several",
        ),
    ],
)
def test_the_recorded_reward_is_that_of_the_service(
    reward: float | None,
    metrics: dict[str, float],
    row: dict[str, Any],
    fields: dict[str, Any],
    found: dict[str, float],
) -> None:
    assert recorded(reward, metrics, row, fields) == found
