"""Commands of the trainer, and checkpoints and weights that a restarted trainer must not use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from world import job, m

from rljob.coordinator.status_report import status_of


async def test_deriving_the_next_command_has_no_side_effects(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(alpha=0), tmp_path)
    await world.start()
    world.connect_all()
    awaited = 0
    for _ in range(400):
        await world.some(1)
        run = world.run
        before = (set(run.scheduler.batches), len(run.ledger._statements), run.trainer.session.busy)
        awaited += run.trainer.awaits_new_batch
        first = run.trainer._next_command()
        assert run.trainer._next_command() == first
        assert before == (set(run.scheduler.batches), len(run.ledger._statements), run.trainer.session.busy)
        if run.finished:
            break
    assert world.run.finished and awaited > 0


async def test_a_batch_is_served_only_once_it_is_durable(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(), tmp_path)
    await world.start()
    world.connect_all()
    world.trainer.hold = True
    await world.settle()
    world.trainer.hold = False
    while not world.run.is_formed(0):
        for part in world.parts:
            part.step()
        world.run.advance()
        if world.run.is_formed(0):
            assert world.run.recorded_batch(0) is None, "formed in this iteration, not committed yet"
            break
        await world.store.drain()
    await world.store.drain()
    batch = world.run.recorded_batch(0)
    assert batch is not None and len(batch.samples) == 4
    assert world.run.recorded_batch(1) is None


async def trained(world: Any, version: int) -> None:
    """Start the world and train until ``version`` is published and its checkpoint, if one is due, is recorded."""
    await world.start()
    world.connect_all()
    while world.run.weights.published < version or (version % 2 == 0 and version not in world.run.trainer.checkpoints):
        await world.some(1)


def restart_trainer(world: Any) -> None:
    world.trainer.disconnect()
    world.trainer.reborn()


async def test_a_checkpoint_with_other_weights_than_were_published_is_refused_and_replayed(
    new_world: Any, tmp_path: Path
) -> None:
    world = new_world(job(alpha=0, steps=6), tmp_path)
    await trained(world, 4)
    published = world.run.weights.digests[0, 4]
    world.trainer.saved[4] = "other weights"
    restart_trainer(world)
    await world.store.drain()
    world.kill_coordinator()
    await world.start()
    world.trainer.connect()
    world.connect_all()
    await world.settle()
    run = world.run
    assert run.finished and run.weights.lineage == 0 and run.weights.digests[0, 4] == published
    assert run.warnings == status_of(run).warnings == [
        "the checkpoint of step 4 was refused: its weights are not those that were published as version 4; the trainer "
        "continues from the checkpoint of step 2"
    ]  # fmt: skip
    assert [row[0] for row in world.store.query("SELECT step FROM incarnations ORDER BY incarnation")] == [0, 4, 2]
    assert world.trainer.saved.keys() == {0, 4, 6}
    world.check_accounts()


@pytest.mark.parametrize("later", [4, 5])
async def test_a_checkpoint_with_another_digest_than_in_the_ledger_is_refused(
    new_world: Any, tmp_path: Path, later: int
) -> None:
    """For example of another run: the weights may be equal, but not the optimizer's state."""
    world = new_world(job(alpha=1, steps=6), tmp_path)
    await trained(world, 4)
    while world.run.version < later:
        await world.some(1)
    world.trainer.digest = lambda step: "another record" if step == 4 else f"record of {step}"
    restart_trainer(world)
    world.trainer.connect()
    await world.settle()
    assert world.run.finished and world.run.weights.lineage == 0
    (warning,) = world.run.warnings
    assert warning.startswith("the checkpoint of step 4 was refused: its digest is not the one in the ledger; ")


@pytest.mark.parametrize("coordinator", ["stays", "is killed"])
async def test_a_trainer_that_reconnects_before_it_is_told_does_not_train_on_a_refused_checkpoint(
    new_world: Any, tmp_path: Path, coordinator: str
) -> None:
    world = new_world(job(alpha=1, steps=6), tmp_path)
    await trained(world, 4)
    world.trainer.digest = lambda step: "another record" if step == 4 else f"record of {step}"
    restart_trainer(world)
    world.trainer.hold = True
    world.trainer.connect()
    await world.store.drain()
    while not any(isinstance(command, m.RefuseCheckpoint) for command in world.trainer.commands):
        await world.some(1)
    assert world.trainer.incarnation
    if coordinator == "is killed":
        world.kill_coordinator()
        await world.start()
        world.connect_all()
    else:
        world.trainer.disconnect()
    world.trainer.commands.clear()
    world.trainer.connect()
    world.trainer.hold = False
    await world.settle()
    assert world.run.finished and world.run.weights.lineage == 0
    assert [row[0] for row in world.store.query("SELECT step FROM incarnations ORDER BY incarnation")] == [0, 4, 2]
    world.check_accounts()


async def test_checkpoints_that_the_trainer_refuses_or_does_not_find_no_longer_count(
    new_world: Any, tmp_path: Path
) -> None:
    world = new_world(job(alpha=1, steps=6, checkpoints={"everySteps": 1, "keep": 3}), tmp_path)
    await trained(world, 4)
    while world.run.trainer.checkpoints.steps != [2, 3, 4]:
        await world.some(1)
    del world.trainer.saved[4], world.trainer.saved[3]
    restart_trainer(world)
    world.trainer.refused = [m.RefusedCheckpoint(4, "model.safetensors is damaged")]
    world.trainer.connect()
    assert world.run.trainer.checkpoints.steps == [2]
    kept = status_of(world.run).last_checkpoint
    assert (kept.step, kept.path) == (2, "checkpoints/step-000002")
    await world.settle()
    assert world.run.finished and world.run.weights.lineage == 0
    assert world.run.warnings == [
        "the checkpoint of step 3 was refused: the trainer did not find checkpoints/step-000003; the trainer continues "
        "from the checkpoint of step 2",
        "the checkpoint of step 4 was refused: model.safetensors is damaged; the trainer continues from the checkpoint "
        "of step 2",
    ]
    world.check_accounts()


async def test_a_trainer_without_a_usable_checkpoint_does_not_start_from_scratch(
    new_world: Any, tmp_path: Path
) -> None:
    world = new_world(job(alpha=1, steps=6), tmp_path)
    await trained(world, 4)
    world.trainer.saved = {0: "start"}
    restart_trainer(world)
    world.trainer.connect()
    (rejected,) = world.trainer.peer.take()
    assert rejected.fatal and rejected.reason == (
        "the trainer finds no checkpoint that it can use, and the batches before step 2 are not stored any more; "
        "restore one of checkpoints/step-000004, checkpoints/step-000002 from a copy, or start another run"
    )
    assert world.run.trainer.session.incarnation == 1


async def test_a_refused_only_checkpoint_and_a_changed_initial_model_end_the_trainer(
    new_world: Any, tmp_path: Path
) -> None:
    for name, keep, version, saved, sentence in (
        ("only", 1, 2, {2: "other"}, "no checkpoint can be used: that of step 2 is refused (its weights are not those"),
        ("initial", 2, 1, {0: "other"}, "the initial model (spec.models, policy) is not the one that this run began "),
    ):
        (tmp_path / name).mkdir()
        world = new_world(job(alpha=1, checkpoints={"everySteps": 2, "keep": keep}), tmp_path / name)
        await trained(world, version)
        world.trainer.saved = saved
        restart_trainer(world)
        rejected: list[Any] = []
        world.trainer.handle = lambda message, handle=world.trainer.handle, found=rejected: (
            found.append(message) if isinstance(message, m.Reject) else handle(message)
        )
        world.trainer.connect()
        for _ in range(20):
            await world.some(1)
        assert len(rejected) == 1 and rejected[0].fatal and rejected[0].reason.startswith(sentence), rejected
        assert world.run.weights.lineage == 0 and world.run.warnings == []


async def test_a_new_lineage_is_in_the_status_also_after_a_restart_of_the_coordinator(
    new_world: Any, tmp_path: Path
) -> None:
    world = new_world(job(alpha=1, steps=5), tmp_path)
    await trained(world, 3)
    restart_trainer(world)
    world.trainer.drift = "other"
    world.trainer.connect()
    await world.settle()
    expected = [
        "lineage 1 starts at version 3: after a restart of the trainer, the repeated steps 2 to 2 gave weights that "
        "differ in bits from the published ones"
    ]
    assert world.run.weights.lineage == 1 and status_of(world.run).warnings == expected
    world.kill_coordinator()
    await world.start()
    assert status_of(world.run).warnings == expected


async def test_a_suspended_run_writes_no_checkpoint_before_its_weights_are_verified(
    new_world: Any, tmp_path: Path
) -> None:
    world = new_world(job(alpha=1, steps=5), tmp_path)
    await trained(world, 3)
    restart_trainer(world)
    world.trainer.drift = "other"
    world.trainer.connect()
    while world.run.trainer.session.step < 3:
        await world.some(1)
    assert world.run.weights.must_verify and world.run.trainer.session.busy == "SendWeights"
    world.trainer.disconnect()
    world.trainer.commands.clear()
    world.trainer.connect()
    world.run.suspend()  # before the digest is asked for again
    await world.settle()
    assert world.run.suspended and world.run.weights.lineage == 1
    digest = world.store.query("SELECT digest FROM publications WHERE step = 3 AND lineage = 1")[0][0]
    assert world.trainer.saved[3] == digest
