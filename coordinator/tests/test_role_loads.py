"""The load of each role in the status: samples that wait for a score, episodes, open samples, engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from world import job

from rljob.coordinator.status_report import status_of
from rljob.protocol.run_status import RunStatus, run_fields


def loads(status: RunStatus) -> dict[str, float]:
    return {each.role: each.load for each in status.loads}


async def test_a_reward_has_the_samples_that_wait_for_its_score(new_world: Any, tmp_path: Path) -> None:
    rewards = [{"name": "r", "builtin": "reasoning_gym"}, {"name": "other", "builtin": "reasoning_gym"}]
    world = new_world(job(n=2, g=3, alpha=0, rewards=rewards), tmp_path)
    await world.start()
    world.connect_all()
    world.runner._score = lambda sample, turns: None  # a slow reward
    world.agents[0].hold = True
    await world.some(30)
    assert loads(status_of(world.run)) == {"runner": 6.0, "reward-r": 0.0, "reward-other": 0.0}
    world.agents[0].hold = False
    await world.some(60)
    assert loads(status_of(world.run)) == {"runner": 6.0, "reward-r": 6.0, "reward-other": 0.0}
    world.run.trajectories.lose_runner(world.runner.peer)
    assert loads(status_of(world.run))["reward-r"] == 0, "no sample waits for a score"
    assert {"role": "runner", "load": 6.0} in run_fields(status_of(world.run))["loads"]


async def test_an_environment_has_the_episodes_that_a_runner_drives(new_world: Any, tmp_path: Path) -> None:
    lake = {"name": "sums", "data": {"seeds": {}}, "loop": "environment", "environment": {"name": "lake"}}
    environments = [{"name": "lake", "builtin": "frozen_lake"}]
    tasks = [lake | {"sampling": {"maxTokens": 16}}]
    world = new_world(job(n=2, g=2, alpha=0, tasks=tasks, environments=environments), tmp_path)
    await world.start()
    world.connect_all()
    world.agents[0].hold = True
    await world.some(30)
    assert loads(status_of(world.run)) == {"runner": 4.0, "reward-r": 0.0, "environment-lake": 4.0}


async def test_a_pool_for_evaluation_needs_room_for_the_answers_of_an_evaluation(
    new_world: Any, tmp_path: Path
) -> None:
    pools = [{"name": "main", "maxConcurrency": 4}, {"name": "test", "maxConcurrency": 4, "purpose": "evaluation"}]
    evaluation = {"problems": 10, "engines": "dedicated"}
    world = new_world(job(rollouts=pools, evaluation=evaluation), tmp_path)
    await world.start()
    assert loads(status_of(world.run))["rollout-test"] == 0
    world.run.evaluations._open = dict.fromkeys(map(str, range(10)))
    assert loads(status_of(world.run))["rollout-test"] == 2.5


async def test_a_finished_run_has_no_load(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(), tmp_path)
    await world.start()
    world.connect_all()
    await world.settle()
    assert world.run.over
    assert {load for role, load in loads(status_of(world.run)).items() if role != "rollout-main"} == {0.0}
