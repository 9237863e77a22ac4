"""Evaluations: shared and dedicated engines, lost versions, few rows, runs without training steps."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from world import job

from rljob.coordinator.status_report import status_of
from rljob.coordinator.tracking import TrackingWriter, finish
from rljob.protocol import trainer_protocol as m

POOLS = [{"name": "main", "maxConcurrency": 4}, {"name": "exam", "maxConcurrency": 4, "purpose": "evaluation"}]
DEDICATED = {"problems": 5, "everySteps": 2, "engines": "dedicated"}


def dedicated_job(**changes: Any) -> Any:
    return job(**{"steps": 6, "rollouts": POOLS, "evaluation": DEDICATED, **changes})


async def begin(new_world: Any, directory: Path, manifest: Any, engines: list[str] | int = 1) -> Any:
    world = new_world(manifest, directory, engines=engines)
    await world.start()
    world.connect_all()
    return world


def versions(world: Any) -> list[int]:
    return [result.version for result in world.run.evaluations.results]


def check_purposes(world: Any) -> None:
    """Assert that each engine ran only requests of its purpose, and that each evaluation used one version."""
    for agent in world.agents:
        kinds = {sample[0] for sample, _, _ in agent.generated}
        assert kinds <= ({"e"} if agent.pool == "exam" else {"g"}), agent.pool
    rows = world.store.query(
        "SELECT s.min_version, s.max_version, g.version FROM samples s JOIN groups g ON g.id = group_id"
        " WHERE kind = 'evaluation' AND state = 'evaluated'"
    )
    assert all(row["min_version"] == row["max_version"] == row["version"] for row in rows)


@pytest.mark.parametrize("alpha", [0, 1])
@pytest.mark.parametrize("engines", [["main", "exam"], ["main", "main", "exam", "exam"]])
async def test_dedicated_engines_do_all_evaluation_and_nothing_else(
    new_world: Any, tmp_path: Path, engines: list[str], alpha: int
) -> None:
    world = await begin(new_world, tmp_path, dedicated_job(alpha=alpha), engines)
    await world.settle()
    assert world.run.finished and versions(world) == [0, 2, 4, 6]
    world.check_accounts()
    check_purposes(world)


async def test_training_continues_while_dedicated_engines_evaluate(new_world: Any, tmp_path: Path) -> None:
    world = await begin(new_world, tmp_path, dedicated_job(), ["main", "exam"])
    exam = world.agents[1]
    exam.hold = True
    await world.settle()
    assert world.run.version == 2, "training stops at the next version to evaluate"
    assert exam.version == 0 and status_of(world.run).state == "Running"
    assert world.run.evaluations.running == 0
    exam.hold = False
    await world.settle()
    assert world.run.finished and versions(world) == [0, 2, 4, 6]
    check_purposes(world)


async def test_an_evaluation_whose_version_is_lost_is_dropped_and_the_next_version_evaluated(
    new_world: Any, tmp_path: Path
) -> None:
    world = await begin(new_world, tmp_path, dedicated_job(evaluation={**DEDICATED, "everySteps": 5}), ["main", "exam"])
    exam, trainer = world.agents[1], world.trainer
    exam.hold = True
    while world.run.version < 3:
        await world.some(1)
    trainer.hold = True
    await world.settle()
    exam.disconnect()
    exam.reborn()
    exam.connect()
    exam.hold = trainer.hold = False
    await world.settle()
    assert world.run.finished
    owed, *rest = versions(world)
    assert owed in (3, 4) and rest == [5, 6]
    dropped = world.store.query("SELECT s.state, s.reason FROM samples s WHERE s.id LIKE 'e0.%'")
    assert {row["state"] for row in dropped} == {"expired"}
    assert "no engine has version 0" in dropped[0]["reason"]
    world.check_accounts()
    check_purposes(world)


async def test_a_restarted_coordinator_knows_the_dropped_evaluation(new_world: Any, tmp_path: Path) -> None:
    world = await begin(
        new_world, tmp_path, dedicated_job(evaluation={**DEDICATED, "everySteps": 50}), ["main", "exam"]
    )
    exam = world.agents[1]
    exam.hold = True
    while world.run.version < 2:
        await world.some(1)
    world.trainer.hold = True
    await world.settle()
    exam.disconnect()
    exam.reborn()
    exam.connect()
    await world.settle()
    assert world.run.evaluations.dropped == 0
    world.kill_coordinator()
    await world.start()
    assert world.run.evaluations.dropped == 0
    exam.hold = world.trainer.hold = False
    world.connect_all()
    await world.settle()
    assert world.run.finished
    assert len(versions(world)) == 2 and 2 <= versions(world)[0] < 6 == versions(world)[1]


@pytest.mark.parametrize("victim", ["coordinator", "connection", "trainer", "runner", "other evaluator"])
async def test_an_evaluation_continues_as_long_as_one_engine_has_its_version(
    new_world: Any, tmp_path: Path, victim: str
) -> None:
    world = await begin(new_world, tmp_path, dedicated_job(), ["main", "exam", "exam"])
    for exam in world.agents[1:]:
        exam.hold = True
    while world.run.version < 2:
        await world.some(1)
    match victim:
        case "coordinator":
            world.kill_coordinator()
            await world.start()
        case "connection":
            world.agents[1].disconnect()
        case "other evaluator":
            world.agents[2].disconnect()
            world.agents[2].reborn()
        case part:
            getattr(world, part).disconnect()
            getattr(world, part).reborn()
    world.connect_all()
    for exam in world.agents[1:]:
        exam.hold = False
    await world.settle()
    assert world.run.finished and versions(world) == [0, 2, 4, 6]
    world.check_accounts()
    check_purposes(world)


@pytest.mark.parametrize("seed", range(40))
async def test_dedicated_evaluations_survive_many_faults(new_world: Any, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    world = await begin(new_world, tmp_path, dedicated_job(alpha=rng.choice([0, 1])), ["main", "exam", "exam"])
    for _ in range(rng.randrange(2, 12)):
        for agent in world.agents:
            agent.hold = rng.random() < 0.4
        world.trainer.hold = rng.random() < 0.2
        await world.some(rng.randrange(15))
        await world.inject_fault(rng)
    for part in (world.trainer, *world.agents):
        part.hold = False
    await world.settle()
    assert world.run.finished and versions(world)[-1] == 6
    world.check_accounts()
    check_purposes(world)


@pytest.mark.parametrize("engines", ["shared", "dedicated"])
async def test_each_held_out_row_is_evaluated_once_if_a_task_has_few(
    new_world: Any, tmp_path: Path, engines: str
) -> None:
    task = {"data": {"reasoningGym": {"dataset": "chain_sum"}}, "reward": "r", "sampling": {"maxTokens": 16}}
    manifest = job(
        tasks=[{"name": "endless", **task}, {"name": "short", **task}],
        evaluation={"problems": 5, "engines": engines},
        rollouts=POOLS if engines == "dedicated" else POOLS[:1],
    )
    world = new_world(manifest, tmp_path, engines=["main", "exam"] if engines == "dedicated" else 1)
    await world.start()
    for part in world.parts:
        if part is not world.runner:
            part.connect()
    await world.settle()
    assert world.run.evaluations.running is None, "the number of rows is not known yet"
    world.runner.held_out = {"short": 2}
    world.runner.connect()
    await world.settle()
    assert world.run.finished
    problems = [(result.version, result.task, result.problems) for result in world.run.evaluations.results]
    assert problems == [(v, *task) for v in (0, 4) for task in (("endless", 5), ("short", 2))]


async def test_a_task_without_held_out_rows_ends_the_run_with_a_reason(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(evaluation={"problems": 5}), tmp_path)
    world.runner.held_out = {"sums": 0}
    await world.start()
    world.connect_all()
    await world.settle()
    assert world.run.failure is not None and "task sums has no held-out rows" in world.run.failure[1]


async def test_results_count_failed_problems(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(evaluation={"problems": 5}), tmp_path)
    world.reward = lambda sample, result: float("nan") if sample.startswith("e0.3") else 1.0
    await world.start()
    world.connect_all()
    await world.settle()
    first = world.run.evaluations.results[0]
    assert (first.problems, first.failed, first.accuracy, first.mean_reward) == (5, 1, 0.8, 0.8)
    assert first.failure == "its reward is nan"
    world.kill_coordinator()
    await world.start()
    assert world.run.evaluations.results[0] == first


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_result_has_the_last_failure_in_time_also_after_a_restart(
    new_world: Any, tmp_path: Path, restarts: bool
) -> None:
    """Neither the order of the samples nor that of the texts decides."""
    world = new_world(job(steps=0, evaluation={"problems": 4}), tmp_path)
    world.agents[0].hold = True
    await world.start()
    world.connect_all()
    while world.run.evaluations.running is None:
        await world.some(1)
    for sample, reason in (("e0.1.0", "b"), ("e0.3.0", "z"), ("e0.0.0", "a, the last"), ("e0.2.0", "")):
        if restarts:
            await world.store.drain()
            world.kill_coordinator()
            await world.start()
            world.connect_all()
        if reason:
            world.run.outcomes.failed(world.run.trajectories.by_sample[sample], reason, "runner")
    world.agents[0].hold = False
    await world.settle()
    (result,) = world.run.evaluations.results
    assert (result.failed, result.failure) == (3, "a, the last")
    world.kill_coordinator()
    await world.start()
    assert world.run.evaluations.results == [result]


ANSWERS = {"problems": 3, "samplesPerProblem": 4, "passAt": [1, 2, 4], "passReward": 0.5}
REWARDS = {"e0.0": [1.0, 0.0, 0.5, math.nan], "e0.1": [0.0] * 4, "e0.2": [1.0] * 4}
"""Group → rewards of its samples; nan: the sample fails."""


@pytest.mark.parametrize("restarts", [False, True])
async def test_pass_at_k_is_computed_from_all_answers_whenever_the_coordinator_dies(
    new_world: Any, tmp_path: Path, restarts: bool
) -> None:
    world = new_world(job(steps=0, evaluation=ANSWERS), tmp_path)
    world.reward = lambda sample, result: REWARDS[sample.rpartition(".")[0]][int(sample.rpartition(".")[2])]
    await world.start()
    world.connect_all()
    for _ in range(40 if restarts else 0):
        await world.some(1)
        world.kill_coordinator()
        await world.start()
        world.connect_all()
    await world.settle()
    (result,) = world.run.evaluations.results
    assert (result.problems, result.samples_per_problem, result.failed) == (3, 4, 1)
    assert (result.accuracy, result.mean_reward) == (6 / 12, 5.5 / 12)
    rates = {rate.k: rate.value for rate in result.pass_at}
    assert rates == pytest.approx({1: 0.5, 2: (5 / 6 + 0 + 1) / 3, 4: 2 / 3})
    assert len({sample for sample, _, _ in world.agents[0].generated}) == 12
    finish(TrackingWriter(tmp_path, tensorboard=False))
    (line,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert line["evaluation/sums/pass@2"] == line["evaluation/pass@2"] == rates[2]
    assert (line["evaluation/samples"], line["evaluation/failed"]) == (12, 1)
    world.kill_coordinator()
    await world.start()
    assert world.run.evaluations.results[0] == result


@pytest.mark.parametrize("engines", ["shared", "dedicated"])
async def test_a_run_of_no_steps_evaluates_and_succeeds(new_world: Any, tmp_path: Path, engines: str) -> None:
    manifest = dedicated_job(
        steps=0,
        evaluation={"problems": 5, "engines": engines},
        scheduling={"redundancy": {"groups": 2}},
        rollouts=POOLS if engines == "dedicated" else POOLS[:1],
    )
    world = await begin(new_world, tmp_path, manifest, ["main", "exam"] if engines == "dedicated" else 1)
    await world.some(1)
    assert status_of(world.run).state == "Starting"
    await world.settle()
    assert status_of(world.run).state == "Succeeded" and versions(world) == [0]
    assert world.trainer.saved == {0: "start"} and not world.run.trainer.checkpoints.steps
    assert not world.store.query("SELECT 1 FROM groups WHERE kind = 'train'")


async def test_a_trainer_that_reconnects_during_a_batch_does_not_get_a_send_command_for_its_old_version(
    new_world: Any, tmp_path: Path
) -> None:
    world = await begin(new_world, tmp_path, job(steps=4))
    trainer = world.trainer
    while not any(isinstance(command, m.Train) for command in trainer.commands):
        trainer.hold = not trainer.commands
        await world.some(1)
    train = trainer.commands.pop()
    trainer.disconnect()
    world.agents[0].disconnect()
    world.agents[0].reborn()
    world.agents[0].connect()
    trainer.connect()
    trainer.hold = True
    await world.some(3)
    trainer._execute(train)  # it computed the batch while disconnected
    trainer.hold = False
    await world.settle()
    assert world.run.finished
    world.check_accounts()


async def test_the_status_reports_a_missing_evaluation_engine(new_world: Any, tmp_path: Path) -> None:
    world = await begin(new_world, tmp_path, dedicated_job(), ["main"])
    await world.settle()
    assert status_of(world.run).message == "waiting for an engine for evaluation to connect"


async def test_an_evaluation_does_not_wait_for_leases_of_training_samples(new_world: Any, tmp_path: Path) -> None:
    """The runner takes fewer trajectories than training has in flight, and the trainer waits for the evaluation."""
    manifest = job(n=32, g=2, alpha=4, steps=3, evaluation={"problems": 4, "everySteps": 1})
    world = new_world(manifest, tmp_path)
    await world.start()
    world.runner.turns_of = lambda sample: 1
    world.runner.hello = lambda: msgspec.structs.replace(type(world.runner).hello(world.runner), capacity=8)
    world.connect_all()
    while world.run.evaluations.running != 1:
        await world.some(1)
    (agent,) = world.agents
    before = len(agent.generated)
    while world.run.evaluations.running == 1:
        await world.some(1)
    samples = [sample for sample, _, _ in agent.generated[before:]]
    assert sum(sample.startswith("e1.") for sample in samples) >= 4
    training = sum(sample.startswith("g") for sample in samples)
    assert training <= 10, "little more than the requests that its engine held already"
