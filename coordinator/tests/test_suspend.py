"""Suspending a run at any moment, and resuming it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from world import job, random_job

from rljob.coordinator.metrics import REGISTRY
from rljob.coordinator.routes import build_app
from rljob.coordinator.status_report import status_of
from rljob.protocol import trainer_protocol as m
from rljob.protocol.run_status import decode_status


async def restart(world: Any) -> None:
    """Restart all processes."""
    world.kill_coordinator()
    for part in world.parts:
        part.reborn()
    await world.start()
    world.connect_all()


async def final_state(new_world: Any, directory: Path, manifest: Any) -> str:
    """Return the final trainer state of a run without suspension."""
    directory.mkdir()
    world = new_world(manifest, directory)
    await world.start()
    world.connect_all()
    await world.settle()
    assert world.run.finished
    return str(world.trainer.saved[manifest.spec.training.steps])


@pytest.mark.parametrize("alpha", [0, 1])
@pytest.mark.parametrize("evaluation", [None, {"problems": 3, "everySteps": 2}])
@pytest.mark.parametrize("after", range(0, 75, 3))
async def test_a_run_suspended_at_any_moment_is_durable_and_resumes(
    new_world: Any, tmp_path: Path, after: int, evaluation: Any, alpha: int
) -> None:
    manifest = job(alpha=alpha, steps=5, evaluation=evaluation)
    world = new_world(manifest, tmp_path)
    await world.start()
    world.connect_all()
    await world.some(after)
    world.run.suspend()
    await world.settle()
    assert status_of(world.run).state in ("Suspended", "Succeeded")
    version = world.run.version
    assert version == 0 or world.trainer.saved[version] == world.trainer.state, "there is a checkpoint of every step"
    assert world.run.trainer.checkpoints.newest == version
    await restart(world)
    await world.settle()
    assert world.run.finished
    assert len(world.trainer.batches) == 5, "no batch had to be trained again"
    world.check_accounts()
    if alpha == 0:
        unbroken = await final_state(new_world, tmp_path / "unbroken", manifest)
        assert world.trainer.saved[5] == unbroken


@pytest.mark.parametrize("away", ["trainer", "engine", "all"])
async def test_suspension_is_immediate_if_no_trainer_has_work(new_world: Any, tmp_path: Path, away: str) -> None:
    world = new_world(job(steps=5), tmp_path)
    await world.start()
    if away != "all":
        world.runner.connect()
    if away == "engine":
        world.trainer.connect()
    if away == "trainer":
        world.agents[0].connect()
    await world.settle()
    world.run.suspend()
    await world.settle()
    assert status_of(world.run).state == "Suspended"


async def test_suspension_waits_for_the_current_batch_and_its_checkpoint(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(steps=5), tmp_path)
    await world.start()
    world.connect_all()
    while not any(isinstance(command, m.Train) for command in world.trainer.commands):
        world.trainer.hold = not world.trainer.commands
        await world.some(1)
    version = world.run.version
    world.run.suspend()
    await world.settle()
    status = status_of(world.run)
    assert status.state == "Running" and "finishes its batch" in status.message
    world.trainer.hold = False
    await world.settle()
    assert status_of(world.run).state == "Suspended" and world.run.version == version + 1
    assert version + 1 in world.trainer.saved


async def test_suspension_does_not_wait_for_a_trainer_that_replays(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(steps=6, checkpoints={"everySteps": 100}), tmp_path)
    await world.start()
    world.connect_all()
    while world.run.version < 3:
        await world.some(1)
    world.trainer.disconnect()
    world.trainer.reborn()
    world.trainer.connect()
    while world.run.trainer.session.busy != "Train":
        await world.some(1)
    world.trainer.hold = True
    await world.settle()
    assert any(isinstance(command, m.Train) for command in world.trainer.commands), "it replays"
    world.run.suspend()
    await world.settle()
    assert status_of(world.run).state == "Suspended"
    world.trainer.hold = False
    await restart(world)
    await world.settle()
    assert world.run.finished
    world.check_accounts()


async def test_only_the_owner_token_may_suspend(new_world: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(REGISTRY, "register", lambda collector: None)
    world = new_world(job(), tmp_path)
    await world.start()
    app = build_app(world.run, {"owner": "secret", "agent": "other"})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://coordinator") as client:
        for token in ("other", ""):
            refused = await client.post("/v1/suspend", headers={"Authorization": f"Bearer {token}"})
            assert refused.status_code == 401 and not world.run.suspending
        for _ in range(2):
            accepted = await client.post("/v1/suspend", headers={"Authorization": "Bearer secret"})
            assert accepted.status_code == 200
            await world.settle()
        assert decode_status(accepted.content).state == "Suspended"


@pytest.mark.parametrize("killed", [False, True])
async def test_a_trainer_that_reconnects_during_a_batch_keeps_that_batch(
    new_world: Any, tmp_path: Path, killed: bool
) -> None:
    world = new_world(job(steps=6, checkpoints={"everySteps": 50, "keep": 2}), tmp_path)
    await world.start()
    world.connect_all()
    trainer = world.trainer
    while world.run.version < 3:
        await world.some(1)
    trainer.hold = True
    while not any(isinstance(command, m.Train) for command in trainer.commands):
        await world.some(1)
        while trainer.commands and not isinstance(trainer.commands[0], m.Train):
            trainer._execute(trainer.commands.pop(0))
    step = trainer.commands.pop(0).step  # the trainer computes it from here on
    if killed:
        world.kill_coordinator()
        await world.start()
        world.run.suspend()
        world.connect_all()
    else:
        world.run.suspend()
        trainer.disconnect()
        trainer.connect()
    await world.settle()
    assert [type(command) for command in trainer.commands] == [m.Train], "no checkpoint while it computes the batch"
    trainer.hold = False
    await world.settle()
    assert status_of(world.run).state == "Suspended"
    assert world.run.trainer.checkpoints.steps == [step + 1]


async def test_metrics_that_are_not_finite_are_left_out(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(steps=2), tmp_path)
    say = world.trainer.say

    def say_with_nan(*messages: Any) -> None:
        for message in messages:
            if isinstance(message, m.StepDone):
                message.metrics = {"loss": float("nan"), "tokens": 3.0}
        say(*messages)

    world.trainer.say = say_with_nan
    await world.start()
    world.connect_all()
    await world.settle()
    assert world.run.finished
    rows = world.run.ledger.query("SELECT metrics FROM applied")
    assert [row["metrics"] for row in rows] == ['{"tokens": 3.0}'] * 2


@pytest.mark.parametrize("seed", range(40))
async def test_no_suspension_keeps_weights_that_differ_from_the_published_ones(
    new_world: Any, tmp_path: Path, seed: int
) -> None:
    """Each process of the trainer computes other weights; faults and suspensions come at random moments."""
    rng = random.Random(seed)
    world = new_world(random_job(rng), tmp_path, engines=rng.choice([1, 2]))
    world.commit_turns = lambda: rng.choice([0, 0, 1, 3])
    await world.start()
    world.connect_all()
    for _ in range(rng.randrange(2, 6)):
        await world.some(rng.randrange(30))
        await world.inject_fault(rng)
        world.trainer.disconnect()
        world.trainer.reborn()
        world.trainer.drift = str(rng.random())
        world.connect_all()
        await world.some(rng.randrange(6))
        world.trainer.disconnect()
        world.trainer.commands.clear()
        world.connect_all()
        world.run.suspend()
        await world.settle()
        assert world.run.over
        if world.run.suspended:
            await restart(world)
    await world.settle()
    assert world.run.finished
    world.check_accounts()
    query = "SELECT digest FROM publications WHERE step = ? ORDER BY lineage DESC LIMIT 1"
    published = {step: world.store.query(query, step) for step in world.trainer.saved}
    assert all(not rows or rows[0]["digest"] == world.trainer.saved[step] for step, rows in published.items())
