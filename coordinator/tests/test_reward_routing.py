"""Samples reach the rewards of their task and row; several rewards are added; a slow one delays only its samples."""

from __future__ import annotations

import asyncio

import pytest

from rljob.api.tasks import Task
from rljob.protocol.score_messages import Score, ScoreItem
from rljob.runner.reward_routing import RewardRouter, scorer_of


class FakeReward:
    """Answers with ``score`` once ``gate`` is set."""

    def __init__(
        self, reward: float, error: str = "", turn_rewards: tuple[float, ...] = (), token_ids: bool = False
    ) -> None:
        self.token_ids = token_ids
        self.answer = (reward, {"length": 3.0}, error, list(turn_rewards))
        self.gate = asyncio.Event()
        self.gate.set()
        self.scored: list[str] = []

    async def score(self, item: ScoreItem) -> Score:
        self.scored.append(item.sample)
        await self.gate.wait()
        return Score(item.sample, *self.answer)


def task(**fields: object) -> Task:
    return Task.model_validate({"name": "sums", "data": {"jsonl": {"path": "a"}}, "reward": "exact"} | fields)


def item(row: dict | None = None, sample: str = "g0.0") -> ScoreItem:
    return ScoreItem(sample, "sums", "", "4", "stop", row or {})


def test_a_task_with_one_reward_has_its_client() -> None:
    client = FakeReward(1.0)
    assert scorer_of(task(), {"exact": client}) is client


@pytest.mark.parametrize(("row", "reward"), [({"by": "far"}, 2.0), ({"by": None}, 1.0), ({}, 1.0)])
async def test_a_row_names_its_reward(row: dict, reward: float) -> None:
    clients = {"exact": FakeReward(1.0), "far": FakeReward(2.0)}
    score = await scorer_of(task(rewardColumn="by"), clients).score(item(row))
    assert score == Score("g0.0", reward, {"length": 3.0})
    assert sum(len(client.scored) for client in clients.values()) == 1


@pytest.mark.parametrize("named", ["near", 5, ["far"]])
async def test_a_row_that_names_no_reward_of_the_job_fails_its_sample(named: object) -> None:
    score = await scorer_of(task(rewardColumn="by"), {"exact": FakeReward(1.0)}).score(item({"by": named}))
    assert score.error == (
        f"column 'by' names the reward {named!r}; there are exact; name one of them, or null for the task's reward"
    )


MORE = [{"name": "far", "weight": -0.5}, {"name": "near"}]


async def test_rewards_are_added_with_their_weights() -> None:
    clients = {"exact": FakeReward(1.0), "far": FakeReward(2.0, turn_rewards=(1.0, 0.5)), "near": FakeReward(0.25)}
    score = await RewardRouter(task(moreRewards=MORE), clients).score(item())
    assert (score.reward, score.error, score.turn_rewards) == (0.25, "", [-0.5, -0.25])
    assert score.metrics == {
        **{"reward/exact": 1.0, "reward/far": 2.0, "reward/near": 0.25},
        **{"exact/length": 3.0, "far/length": 3.0, "near/length": 3.0},
    }


async def test_the_row_s_reward_may_be_one_of_the_added_ones() -> None:
    clients = {"exact": FakeReward(1.0), "far": FakeReward(2.0), "near": FakeReward(0.25)}
    score = await RewardRouter(task(rewardColumn="by", moreRewards=MORE), clients).score(item({"by": "far"}))
    assert score.reward == 2.0 - 0.5 * 2.0 + 0.25 and clients["far"].scored == ["g0.0"]


async def test_a_sample_that_one_reward_cannot_score_is_not_scored() -> None:
    clients = {
        "exact": FakeReward(1.0),
        "far": FakeReward(0.0, "reward far took longer than 1 s"),
        "near": FakeReward(1),
    }
    score = await RewardRouter(task(moreRewards=MORE), clients).score(item())
    assert score == Score("g0.0", 0.0, {}, "reward far took longer than 1 s")


async def test_a_slow_reward_delays_only_the_samples_that_it_scores() -> None:
    slow, fast = FakeReward(1.0), FakeReward(2.0)
    slow.gate.clear()
    router = scorer_of(task(rewardColumn="by"), {"exact": slow, "far": fast})
    waiting = [asyncio.create_task(router.score(item({}, f"slow.{i}"))) for i in range(100)]
    async with asyncio.timeout(60):
        others = await asyncio.gather(*(router.score(item({"by": "far"}, f"fast.{i}")) for i in range(100)))
    assert [score.reward for score in others] == [2.0] * 100 and not any(each.done() for each in waiting)
    slow.gate.set()
    assert [(await each).reward for each in waiting] == [1.0] * 100


@pytest.mark.parametrize("of_far", [False, True])
def test_token_ids_are_needed_if_a_reward_needs_them(of_far: bool) -> None:
    clients = {"exact": FakeReward(1.0), "far": FakeReward(2.0, token_ids=of_far), "near": FakeReward(0.25)}
    assert RewardRouter(task(moreRewards=MORE), clients).token_ids is of_far
