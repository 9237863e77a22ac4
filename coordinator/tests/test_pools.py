"""Several engines, pools and tasks: assignment of requests, and shares of tasks."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from world import job

from rljob.runner.setup import model_length

TASK = {"data": {"reasoningGym": {"dataset": "chain_sum"}}, "reward": "r", "sampling": {"maxTokens": 16}}
POOLS = [
    {"name": "short", "maxConcurrency": 8, "maxModelLength": 24},
    {"name": "long", "maxConcurrency": 2, "maxModelLength": 200},
    {"name": "middle", "maxConcurrency": 4, "maxModelLength": 60},
]
LENGTHS = {pool["name"]: pool["maxModelLength"] for pool in POOLS}


def prompt_of_many_lengths(drive: Any) -> list[int]:
    """Return 3 to 104 tokens: with 16 more, a fifth of the sequences fits every pool."""
    return [drive.row] * (3 + drive.row * 37 % 102)


async def begin(new_world: Any, directory: Path, manifest: Any, engines: list[str]) -> Any:
    world = new_world(manifest, directory, engines=engines)
    world.runner.prompt = prompt_of_many_lengths
    await world.start()
    world.connect_all()
    return world


@pytest.mark.parametrize("alpha", [0, 2])
async def test_a_request_goes_only_where_it_fits(new_world: Any, tmp_path: Path, alpha: int) -> None:
    world = await begin(new_world, tmp_path, job(alpha=alpha, n=6, steps=5, rollouts=POOLS), list(LENGTHS))
    await world.settle()
    assert world.run.finished
    world.check_accounts()
    for agent in world.agents:
        assert agent.generated, f"{agent.pool} got requests"
        assert all(tokens <= LENGTHS[agent.pool] for _, tokens, _ in agent.generated)


async def test_requests_for_the_long_engine_do_not_block_other_requests(new_world: Any, tmp_path: Path) -> None:
    manifest = job(n=100, g=2, steps=1, alpha=0, rollouts=POOLS)
    world = await begin(new_world, tmp_path, manifest, ["short", "long"])
    short, long = world.agents
    world.runner.turns_of = lambda sample: 1
    long.hold = True
    await world.settle()
    fits = [row for row in range(100) if 3 + row * 37 % 102 + 16 <= LENGTHS["short"]]
    begun = {sample.partition(".")[0] for agent in (short, long) for sample, _, _ in agent.generated}
    assert {f"g{row}" for row in fits} <= begun
    assert len(world.run.trajectories.queue) == 200 - len(short.generated) - len(long.generated) > 64
    long.hold = False
    await world.settle()
    assert world.run.finished


async def test_no_engine_gets_more_requests_than_it_accepts(new_world: Any, tmp_path: Path) -> None:
    manifest = job(n=64, g=2, steps=2, rollouts=POOLS)
    world = await begin(new_world, tmp_path, manifest, ["short", "long", "middle", "short"])
    most: Counter[str] = Counter()
    while not world.run.finished:
        await world.some(1)
        for engine in world.run.engines.by_instance.values():
            most[engine.pool] = max(most[engine.pool], len(engine.requests))
    assert all(most[pool["name"]] <= pool["maxConcurrency"] + 4 for pool in POOLS)
    assert most["short"] > most["long"] >= 2


@pytest.mark.parametrize("seed", range(20))
async def test_pools_of_all_kinds_survive_many_faults(new_world: Any, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    exam = {"name": "exam", "maxModelLength": 200, "purpose": "evaluation"}
    manifest = job(
        alpha=rng.choice([0, 1]), n=4, rollouts=[*POOLS, exam],
        evaluation={"problems": 6, "everySteps": 2, "engines": "dedicated"},
        tasks=[{"name": "a", "weight": 2, **TASK}, {"name": "b", **TASK}],
    )  # fmt: skip
    world = await begin(new_world, tmp_path, manifest, ["short", "long", "middle", "exam", "exam"])
    for _ in range(rng.randrange(3, 12)):
        for agent in world.agents:
            agent.hold = rng.random() < 0.3
        await world.some(rng.randrange(15))
        await world.inject_fault(rng)
    for agent in world.agents:
        agent.hold = False
    await world.settle()
    assert world.run.finished
    world.check_accounts()
    for agent in world.agents:
        assert all(tokens <= agent.settings.max_model_length for _, tokens, _ in agent.generated)
        assert {sample[0] for sample, _, _ in agent.generated} <= ({"e"} if agent.pool == "exam" else {"g"})


@pytest.mark.parametrize("kill", [False, True])
async def test_the_shares_of_tasks_are_exact_at_every_moment(new_world: Any, tmp_path: Path, kill: bool) -> None:
    weights = {"a": 5.0, "b": 2.0, "c": 1.0}
    tasks = [{"name": name, "weight": weight, **TASK} for name, weight in weights.items()]
    world = await begin(new_world, tmp_path, job(n=8, steps=6, tasks=tasks, rollouts=POOLS), ["long", "middle"])
    if kill:
        await world.some(25)
        world.kill_coordinator()
        await world.start()
        world.connect_all()
    await world.settle()
    rows = world.store.query("SELECT task, row FROM groups WHERE kind = 'train' ORDER BY seq")
    taken: Counter[str] = Counter()
    for count, row in enumerate(rows, start=1):
        assert row["row"] == taken[row["task"]], "each task's rows come in order"
        taken[row["task"]] += 1
        assert all(abs(taken[name] - count * weight / 8) < 1 for name, weight in weights.items())
    assert len(rows) >= 48


def test_a_sequence_may_be_as_long_as_some_engine_of_each_purpose_takes() -> None:
    exam = {"name": "exam", "maxModelLength": 100, "purpose": "evaluation"}
    assert model_length(job(rollouts=POOLS).spec) == 200
    manifest = job(rollouts=[*POOLS, exam], evaluation={"problems": 6, "engines": "dedicated"})
    assert model_length(manifest.spec) == 100
