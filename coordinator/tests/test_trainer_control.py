"""Commands of the trainer, and checkpoints and weights that a restarted trainer must not use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from world import Trainer, generate_tokens, job

from rljob.api.job_status import MOST_WARNINGS
from rljob.coordinator.status_report import status_of
from rljob.protocol import trainer_protocol as m
from rljob.protocol.agent_protocol import Completion, Generate
from rljob.protocol.shared_messages import Reject


async def test_deriving_the_next_command_has_no_side_effects(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(alpha=0), tmp_path)
    await world.start()
    world.connect_all()
    awaited = 0
    for _ in range(400):
        await world.some(1)
        run = world.run
        before = (set(run.scheduler.batches), len(run.ledger._queue), run.trainer.session.busy)
        awaited += run.trainer.awaits_new_batch
        first = run.trainer._next_command()
        assert run.trainer._next_command() == first
        assert before == (set(run.scheduler.batches), len(run.ledger._queue), run.trainer.session.busy)
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


async def test_a_batch_names_the_task_of_each_sample_and_whether_its_answer_was_cut(
    new_world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate(request: Generate, begun: int, version: int) -> Completion:
        cut = request.request_id.sample.endswith(".1")
        completion = generate_tokens(request, begun, version)
        return msgspec.structs.replace(completion, finish="length" if cut else "stop")

    monkeypatch.setattr("world.generate_tokens", generate)
    task = {"data": {"reasoningGym": {"dataset": "chain_sum"}}, "reward": "r", "sampling": {"maxTokens": 16}}
    world = new_world(job(tasks=[{"name": "sums", **task}, {"name": "more", **task}]), tmp_path)
    batches: list[m.Train] = []
    world.trainer.check = lambda command, data: batches.append(command)
    await world.start()
    world.connect_all()
    await world.settle()
    tasks = dict(world.store.query("SELECT s.id, g.task FROM samples s JOIN groups g ON g.number = s.group_number"))
    samples = [sample for batch in batches for sample in batch.samples]
    assert {sample.task for sample in samples} == {"sums", "more"}
    for sample in samples:
        assert (sample.task, sample.truncated) == (tasks[sample.sample], sample.sample.endswith(".1"))


async def trained(world: Any, version: int) -> None:
    """Start the world and train until ``version`` is published and its checkpoint, if one is due, is recorded."""
    await world.start()
    world.connect_all()
    while world.run.weights.published < version or (version % 2 == 0 and version not in world.run.trainer.checkpoints):
        await world.some(1)


def restart_trainer(world: Any) -> None:
    world.trainer.disconnect()
    world.trainer.reborn()


async def connect_rejected(world: Any) -> Reject:
    """Connect the trainer; return the one rejection that it gets."""
    rejected: list[Reject] = []
    handle = world.trainer.handle
    world.trainer.handle = lambda message: rejected.append(message) if isinstance(message, Reject) else handle(message)
    world.trainer.connect()
    for _ in range(20):
        await world.some(1)
    (found,) = rejected
    return found


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


async def test_a_checkpoint_whose_writer_died_before_it_could_report_it_is_recorded(
    new_world: Any, tmp_path: Path
) -> None:
    world = new_world(job(alpha=1, steps=6), tmp_path)
    await trained(world, 2)
    world.trainer.hold_writes = True
    while world.run.version < 5:
        await world.some(1)
    step, state, _ = world.trainer.writing
    world.trainer.saved[step] = state  # durable, but not reported
    restart_trainer(world)
    world.trainer.hold_writes = False
    world.trainer.connect()
    while world.run.trainer.checkpoints.steps != [2, 4]:
        assert world.run.trainer.checkpoints.steps == [2], "no later checkpoint is recorded before"
        await world.some(1)
    await world.settle()
    assert world.run.finished and world.run.weights.lineage == 0 and world.trainer.saved.keys() == {0, 4, 6}
    world.check_accounts()


@pytest.mark.parametrize("step", [6, 9])
async def test_a_newer_checkpoint_than_the_ledger_is_refused_while_there_is_another(
    new_world: Any, tmp_path: Path, step: int
) -> None:
    """A user has copied it into the run directory."""
    world = new_world(job(alpha=1, steps=6), tmp_path)
    await trained(world, 4)
    version = world.run.version
    restart_trainer(world)
    world.trainer.saved[step] = "another run"
    world.trainer.reborn()
    world.trainer.connect()
    await world.settle()
    assert world.run.finished and world.run.weights.lineage == 0 and version < 6
    (warning,) = world.run.warnings
    assert warning == (
        f"the checkpoint of step {step} was refused: the ledger ends at step {version}, so it is not of this run; the "
        "trainer continues from the checkpoint of step 4"
    )
    assert world.trainer.saved[6] != "another run"
    world.check_accounts()


@pytest.mark.parametrize("later", [4, 5])
@pytest.mark.parametrize("meanwhile", ["nothing", "the connection breaks", "the coordinator is killed"])
async def test_a_checkpoint_with_another_digest_than_in_the_ledger_is_refused(
    new_world: Any, tmp_path: Path, later: int, meanwhile: str
) -> None:
    """For example of another run: the weights may be equal, but not the optimizer's state. ``meanwhile``: before the
    trainer receives the refusal."""
    world = new_world(job(alpha=1, steps=6), tmp_path)
    await trained(world, 4)
    while world.run.version < later:
        await world.some(1)
    world.trainer.digest = lambda step: "another record" if step == 4 else f"record of {step}"
    restart_trainer(world)
    world.trainer.hold = True
    world.trainer.connect()
    await world.store.drain()
    while not any(isinstance(command, m.RefuseCheckpoint) for command in world.trainer.commands):
        await world.some(1)
    assert world.trainer.incarnation
    if meanwhile != "nothing":
        world.trainer.commands.clear()
        if meanwhile == "the coordinator is killed":
            world.kill_coordinator()
            await world.start()
            world.connect_all()
        else:
            world.trainer.disconnect()
        world.trainer.connect()
    world.trainer.hold = False
    await world.settle()
    assert world.run.finished and world.run.weights.lineage == 0
    (warning,) = world.run.warnings
    assert warning.startswith("the checkpoint of step 4 was refused: its digest is not the one in the ledger; ")
    assert [row[0] for row in world.store.query("SELECT step FROM incarnations ORDER BY incarnation")] == [0, 4, 2]
    world.check_accounts()


async def test_training_continues_while_a_checkpoint_is_written_and_the_end_waits_for_it(
    new_world: Any, tmp_path: Path
) -> None:
    world = new_world(job(alpha=1, steps=5, checkpoints={"everySteps": 2, "keep": 1}), tmp_path)
    await world.start()
    world.connect_all()
    trainer = world.trainer
    trainer.hold_writes = True
    while trainer.step_ < 3:
        await world.some(1)
    assert trainer.writing[0] == 2 and world.run.trainer.checkpoints.steps == []
    trainer.disconnect()
    trainer.connect()  # the checkpoint is not requested again, because the weights have changed
    while trainer.step_ < 5 or trainer.writing[0] != 5:
        await world.some(1)
        assert not world.run.finished
    assert world.run.trainer.checkpoints.steps == [4]
    trainer.hold_writes = False
    await world.settle()
    assert world.run.finished and set(trainer.saved) == {0, 5} and world.run.trainer.checkpoints.steps == [5]
    world.check_accounts()


async def test_a_run_suspends_only_when_its_checkpoint_is_durable(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(alpha=1, steps=5, checkpoints={"everySteps": 2}), tmp_path)
    await world.start()
    world.connect_all()
    world.trainer.hold_writes = True
    while world.trainer.step_ < 3:
        await world.some(1)
    world.run.suspend()
    while world.trainer.writing[0] == 2:
        await world.some(1)
    for _ in range(50):
        await world.some(1)
    assert not world.run.suspended and 2 in world.run.trainer.checkpoints
    world.trainer.hold_writes = False
    await world.settle()
    assert world.run.suspended and world.trainer.step_ in world.run.trainer.checkpoints


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
    assert world.run.trainer.session.busy == "TrainerRegistered", "it has not said what it did not find"
    while world.run.trainer.session.busy == "TrainerRegistered":
        await world.some(1)
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
    rejected = await connect_rejected(world)
    assert rejected.fatal and rejected.reason == (
        "the trainer finds no checkpoint that it can use, and the batches before step 2 are not stored any more; "
        "restore one of checkpoints/step-000004, checkpoints/step-000002 from a copy, or start another run"
    )
    assert world.run.warnings == []


@pytest.mark.parametrize("keep", [1, 2])
async def test_a_checkpoint_written_while_the_next_trainer_loads_is_taken_and_not_refused(
    new_world: Any, tmp_path: Path, keep: int
) -> None:
    """``keep`` 1: the checkpoint that the next trainer loaded has been removed since."""
    world = new_world(job(alpha=1, steps=6, checkpoints={"everySteps": 2, "keep": keep}), tmp_path)
    await trained(world, 2)
    late = Trainer(world)
    late.saved = world.trainer.saved
    late.reborn()
    while 4 not in world.run.trainer.checkpoints:
        await world.some(1)
    world.trainer = late
    world.trainer.connect()
    await world.settle()
    assert world.run.finished and world.run.warnings == [] and world.run.weights.lineage == 0
    assert [row[0] for row in world.store.query("SELECT step FROM incarnations ORDER BY incarnation")] == [0, 2, 4]
    world.check_accounts()


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
        rejected = await connect_rejected(world)
        assert rejected.fatal and rejected.reason.startswith(sentence), rejected
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
    for n in range(MOST_WARNINGS):
        world.run.warn(f"warning {n}")
    world.run.warn("warning 3")
    newest = [f"warning {n}" for n in range(MOST_WARNINGS)]
    await world.store.drain()
    assert (status_of(world.run).warnings, status_of(world.run).earlier_warnings) == (newest, 1)
    world.kill_coordinator()
    await world.start()
    assert (status_of(world.run).warnings, status_of(world.run).earlier_warnings) == (newest, 1)


@pytest.mark.parametrize("suspended", [False, True])
async def test_a_trainer_whose_result_was_lost_is_asked_for_it_again(
    new_world: Any, tmp_path: Path, suspended: bool
) -> None:
    world = new_world(job(alpha=1, steps=3), tmp_path)
    await world.start()
    say, lost = world.trainer.say, []
    world.trainer.say = lambda *messages: (lost.append if isinstance(messages[0], m.StepDone) else say)(*messages)
    world.connect_all()
    await world.settle()
    assert lost and world.run.version == 0 and world.trainer.step_ == 1
    world.trainer.say, world.trainer.last = say, None
    world.trainer.disconnect()
    if suspended:
        world.run.suspend()
    world.trainer.connect()
    await world.settle()
    assert world.run.suspended if suspended else world.run.finished
    assert world.run.version == (1 if suspended else 3)
    assert world.store.query("SELECT metrics FROM applied WHERE step = 0")[0][0] == '{"loss": 0.0}'


@pytest.mark.parametrize("formed", [False, True])
async def test_a_suspended_run_writes_no_checkpoint_before_its_weights_are_verified(
    new_world: Any, tmp_path: Path, formed: bool
) -> None:
    world = new_world(job(alpha=1, steps=5), tmp_path)
    await trained(world, 3)
    world.trainer.hold = True
    while formed and not world.run.is_formed(3):  # it must not be taken for the batch that the trainer computes
        await world.some(1)
    world.trainer.hold = False
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
