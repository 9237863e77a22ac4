"""The trainer as a process, driven by a fake coordinator with the real messages."""

from __future__ import annotations

import asyncio
import resource
from array import array

import msgspec
import pytest
from safetensors.numpy import load_file
from training_steps import OF_CRITIC, OF_OTHERS

from e2e.fakes.hub import serving_hub
from rljob.protocol import trainer_protocol as m
from rljob.protocol.checkpoint_record import TrainerState, find_damage
from rljob.protocol.environment import ComponentEnvironment
from rljob.protocol.shared_messages import Reject
from rljob.trainer.backends.fsdp.backend import FsdpBackend
from rljob.trainer.checkpoint import CheckpointStore, read_configuration, read_state
from rljob.trainer.errors import ModelError
from rljob.trainer.loop import TrainerLoop
from rljob.trainer.main import main
from rljob.trainer.metrics import METRICS
from rljob.transfer.receiver import WeightReceiver
from rljob.transfer.rendezvous import Rendezvous

WAIT_SECONDS = 50


KL = {"klCoefficient": 0.5, "klIn": "reward"}
"""Against the first weights: they stay the reference after a restart."""


PPO = {"preset": "ppo", "minibatches": 2}
"""The policy's weights depend on the critic's, which a resumed trainer must restore to the bit."""


@pytest.mark.parametrize(
    ("lora", "algorithm", "added"),
    [
        (None, {}, set()),
        ({"rank": 4}, {}, set()),
        (None, KL, {"kl_coefficient", "reference_kl_k1", "reference_kl_k3", "seconds_frozen"}),
        ({"rank": 4}, PPO, OF_CRITIC),
    ],
)
async def test_a_killed_trainer_resumes_from_an_intact_checkpoint_and_replays_to_the_same_bits(
    tmp_path, model_directory, job, batch, coordinator, start, lora, algorithm, added
):
    trainer = {"optimizer": {"learningRate": 1e-3, "maxGradNorm": 0.5}, "lora": lora}
    made = job(trainer=trainer, algorithm=algorithm)
    coordinator.batches = {step: batch(seed=step, step=step) for step in range(4)}
    (process,) = await start(coordinator, made)
    assert (await coordinator.admit()).step == 0

    before = await coordinator.digest()
    done = await coordinator.train(0)
    assert done.metrics.keys() == METRICS.keys() - {"first_step_logprob_error", "entropy"} - OF_OTHERS | added
    assert done.metrics["tokens"] == sum(s.response_tokens for s in coordinator.batches[0][0].samples)
    assert len(array("f", done.advantages)) == len(coordinator.batches[0][0].samples) and any(done.advantages)
    assert await coordinator.digest() != before
    coordinator.answers = [503, 500]  # the coordinator is restarting: the pull is repeated
    await coordinator.train(1)

    await coordinator.send(m.Checkpoint(1, 2, []), coordinator.batches[2][0])  # trains while it writes
    assert (await coordinator.receive(m.CheckpointCopied)).step == 2
    assert (await coordinator.receive(m.StepDone)).step == 2
    assert (await coordinator.receive(m.Checkpointed)).path == "checkpoints/step-000002"
    await coordinator.train(3)
    after_four = await coordinator.digest()

    await coordinator.train(3)  # a repeated command: answered, not applied again
    assert await coordinator.digest() == after_four
    await coordinator.send(m.Checkpoint(1, 4, []))
    written = await coordinator.receive(m.Checkpointed)

    process.kill()
    await process.wait()
    kept = tmp_path / "storage" / "checkpoints" / "step-000004"
    assert read_state(kept).digest == written.digest
    damaged = bytearray((kept / "model.safetensors").read_bytes())
    damaged[-9] ^= 1
    (kept / "model.safetensors").write_bytes(damaged)
    (process,) = await start(coordinator, made)
    registered = await coordinator.admit(4)
    assert (registered.step, registered.digest) == (2, read_state(kept.with_name("step-000002")).digest)
    reason = f"{kept}/model.safetensors is damaged (it does not have the digest in trainer.json)"
    assert registered.refused == [m.RefusedCheckpoint(4, reason)]
    await coordinator.train(2)
    await coordinator.send(m.SendWeights(1, 9, []))  # of a lower incarnation: dropped, digest() receives no update 9
    await coordinator.train(3)
    assert await coordinator.digest() == after_four

    await coordinator.socket.close()  # the connection breaks; training continues
    again = await coordinator.receive(m.RegisterTrainer)
    assert (again.incarnation, again.step) == (2, 4)
    repeated = await coordinator.receive(m.StepDone)
    assert (repeated.incarnation, repeated.step) == (2, 3) and "loss" in repeated.metrics
    await coordinator.send(m.TrainerRegistered(2, 4), m.Checkpoint(2, 4, [2]))
    assert (await coordinator.receive(m.Checkpointed)).digest == read_state(kept).digest
    await coordinator.send(
        m.RefuseCheckpoint(1, 4, "of a lower incarnation"), m.RefuseCheckpoint(2, 4, "of another run")
    )
    assert await asyncio.wait_for(process.wait(), WAIT_SECONDS) == 1, "another process starts"

    (aside,) = (path for path in kept.parent.iterdir() if path.is_dir())
    assert aside.name.startswith("step-000004.refused-")
    assert {path.name for path in aside.iterdir()} >= {"config.json", "tokenizer.json", "model.safetensors"}
    assert load_file(aside / "model.safetensors").keys() == load_file(model_directory / "model.safetensors").keys()


def receive(ready: m.WeightGroupReady, bucket_bytes: int) -> str:
    """Join the group like an engine and receive all weights; return their digest."""
    rendezvous = Rendezvous(ready.group, ready.address, ready.port, ready.world_size)
    receiver = WeightReceiver("cpu")
    receiver.join(rendezvous, 1, "gloo", bucket_bytes, 20.0)
    receiver.receive(ready.parameters, lambda tensors: None, 20.0)
    receiver.leave()
    return receiver.digest


async def test_an_engine_that_joins_after_the_next_step_gets_the_weights_of_its_update(job, batch, coordinator, start):
    made = job()
    coordinator.batches = {0: batch()}
    (process,) = await start(coordinator, made)
    await coordinator.admit()
    promised = await coordinator.digest()
    await coordinator.send(m.SendWeights(1, 2, [m.EngineTarget("late", False, 1)]))
    ready = await coordinator.receive(m.WeightGroupReady)
    await coordinator.train(0)
    assert await asyncio.to_thread(receive, ready, made.spec.weight_sync.bucket_bytes) == promised
    sent = await coordinator.receive(m.WeightsSent)
    assert (sent.update, sent.engine, sent.digest, sent.error) == (2, "late", promised, "")
    assert await coordinator.digest() != promised
    await coordinator.send(Reject("the run is someone else's", fatal=True))
    assert await asyncio.wait_for(process.wait(), WAIT_SECONDS) == 2


async def test_two_ranks_train_while_a_send_waits_and_report_a_bad_batch(job, batch, coordinator, start):
    coordinator.batches = {step: batch(seed=step, step=step) for step in range(3)}
    processes = await start(coordinator, job(), ranks=2)
    await coordinator.admit()
    await coordinator.train(0)
    assert sorted(i for step, mine in coordinator.pulls for i in mine) == list(range(12))

    await coordinator.send(m.SendWeights(1, 7, [m.EngineTarget("engine-that-never-joins", True, 2)]))
    ready = await coordinator.receive(m.WeightGroupReady)
    assert (ready.update, ready.transport, ready.world_size) == (7, "gloo", 3)
    assert "lm_head.weight" not in {meta.name for meta in ready.parameters}
    await coordinator.train(1)
    await coordinator.send(m.CancelSend(1, 7, ready.engine))
    assert (await coordinator.receive(m.WeightsSent)).error == "cancelled"

    train, tokens = coordinator.batches[2]
    broken = [msgspec.structs.replace(entry, segments=[]) for entry in tokens]
    coordinator.batches[2] = (train, broken)
    await coordinator.send(train)
    failed = await coordinator.receive(m.TrainerFailed)
    assert failed.incarnation == 1 and "do not cover" in failed.reason
    await coordinator.send(m.Stop("the run failed"))
    assert [await asyncio.wait_for(process.wait(), WAIT_SECONDS) for process in processes] == [2, 2]


async def test_two_ranks_write_a_checkpoint_beside_training_and_wait_for_room_on_the_disk_of_one(
    tmp_path, job, batch, coordinator, start
):
    coordinator.batches = {step: batch(seed=step, step=step) for step in range(4)}
    first, second = await start(coordinator, job(), ranks=2)
    await coordinator.admit()
    await coordinator.train(0)
    await coordinator.send(m.Checkpoint(1, 1, []))
    one = await coordinator.receive(m.Checkpointed)
    kept = tmp_path / "storage" / "checkpoints" / "step-000001"
    parts = {f"{stem}-0000{i}-of-00002.safetensors" for stem in ("model", "trainer/optimizer") for i in (1, 2)}
    record = read_state(kept)
    assert parts <= record.files.keys() and one.digest == record.digest and find_damage(kept, record.files) == ""

    await coordinator.train(1)
    resource.prlimit(second.pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    await coordinator.send(m.Checkpoint(1, 2, []))
    waits = await coordinator.receive(m.TrainerBlocked)
    assert f"the checkpoint of step 2 does not fit the disk of {tmp_path}/storage/checkpoints" in waits.reason
    await coordinator.train(2)  # while the checkpoint waits
    resource.prlimit(second.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    while (await coordinator.receive(m.TrainerBlocked)).reason:
        pass
    assert (await coordinator.receive(m.Checkpointed)).step == 2

    resource.prlimit(second.pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    await coordinator.send(m.Checkpoint(1, 3, [1]))
    while not (await coordinator.receive(m.TrainerBlocked)).reason:
        pass
    second.kill()
    assert await asyncio.wait_for(first.wait(), WAIT_SECONDS) != 0
    processes = await start(coordinator, job(), ranks=2)
    assert (await coordinator.admit(3)).step == 2
    await coordinator.train(2)
    await coordinator.send(m.Checkpoint(2, 3, [1, 2]))
    assert (await coordinator.receive(m.Checkpointed)).step == 3
    await coordinator.send(m.Stop("done"))
    assert [await asyncio.wait_for(process.wait(), WAIT_SECONDS) for process in processes] == [0, 0]
    assert {path.name for path in kept.parent.iterdir() if path.is_dir()} == {"step-000003"}


def test_without_its_environment_the_trainer_exits_with_2(monkeypatch, caplog):
    monkeypatch.delenv("RLJOB_JOB", raising=False)
    with pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == 2
    assert "RLJOB_JOB is not set" in caplog.text


@pytest.mark.parametrize("name", ["model.safetensors", "trainer/optimizer.safetensors"])
def test_a_damaged_checkpoint_is_named(tmp_path, model_directory, job, world, name):
    backend = FsdpBackend(model_directory, job().spec.trainer, world)
    state = TrainerState(1, 1, 1, {}, {})
    configuration = read_configuration(model_directory)
    CheckpointStore(tmp_path).write(world, state, configuration, backend.save())
    checkpoint = tmp_path / "checkpoints" / "step-000001"
    path = checkpoint / name
    path.write_bytes(path.read_bytes()[:-10])
    environment = ComponentEnvironment(job(), tmp_path, "http://127.0.0.1:9", "t", "", "", "127.0.0.1")
    with pytest.raises(
        ModelError,
        match=rf"^no checkpoint can be used: {path} is damaged .*restore the file from a copy, or start another run$",
    ):
        TrainerLoop(environment, world)


def test_a_trainer_ends_if_another_one_wrote_a_checkpoint_while_it_loaded(
    tmp_path, model_directory, job, world, monkeypatch
):
    environment = ComponentEnvironment(job(), tmp_path, "http://127.0.0.1:9", "t", "", "", "127.0.0.1")
    loop, refused = TrainerLoop(environment, world), []
    state = TrainerState(4, 4, 1, {}, {})
    CheckpointStore(tmp_path).write(world, state, read_configuration(model_directory), loop._backend.save())
    commands = iter([m.TrainerRegistered(1, 5, [3]), m.TrainerRegistered(2, 5, [3, 4])])
    monkeypatch.setattr(loop._coordinator, "next", lambda: next(commands))
    monkeypatch.setattr(loop._coordinator, "refuse", refused.extend)
    assert loop._execute_until_stop() == 1, "another process starts, and loads it"
    assert refused == [m.RefusedCheckpoint(3, "the trainer did not find checkpoints/step-000003")]


def test_the_trainer_starts_from_a_model_of_the_hub(tmp_path, model_directory, job, world, monkeypatch):
    monkeypatch.setenv("RLJOB_MODEL_CACHE", str(tmp_path / "cache"))
    made = job(models=[{"name": "policy", "source": "hf://org/tiny"}])
    environment = ComponentEnvironment(made, tmp_path, "http://127.0.0.1:9", "t", "", "", "127.0.0.1")
    with serving_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with pytest.raises(ModelError, match=r"^spec.models\[0\].source: .* has no model org/tiny \(404\)"):
            TrainerLoop(environment, world)
        hub.add_directory("org/tiny", model_directory)
        loop = TrainerLoop(environment, world)
    assert {tensor.shape for _, tensor in loop._backend.named_tensors()}
    assert (tmp_path / "cache" / "hub").is_dir()


async def test_a_trainer_on_a_full_disk_waits_and_reports_it(tmp_path, job, batch, coordinator, start):
    coordinator.batches = {0: batch()}
    (process,) = await start(coordinator, job())
    await coordinator.admit()
    await coordinator.train(0)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    await coordinator.send(m.Checkpoint(1, 1, []))
    waits = await coordinator.receive(m.TrainerBlocked)
    assert f"the checkpoint of step 1 does not fit the disk of {tmp_path}/storage/checkpoints" in waits.reason
    await coordinator.send(m.Checkpoint(1, 1, []))  # again, as after a reconnect
    for _ in range(2):
        assert (await coordinator.receive(m.CheckpointCopied)).step == 1
    coordinator.batches[1] = batch(step=1)
    await coordinator.train(1)  # while the checkpoint waits
    await coordinator.send(m.Checkpoint(1, 2, [1]))  # waits for that of step 1
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    while (await coordinator.receive(m.TrainerBlocked)).reason:
        pass
    assert (await coordinator.receive(m.Checkpointed)).step == 1
    assert (await coordinator.receive(m.CheckpointCopied)).step == 2
    assert (await coordinator.receive(m.Checkpointed)).step == 2
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    coordinator.batches[2] = batch(step=2)
    await coordinator.train(2)
    await coordinator.send(m.Checkpoint(1, 3, [2]))
    await coordinator.receive(m.TrainerBlocked)
    await coordinator.send(m.Stop("the run failed"))
    assert await asyncio.wait_for(process.wait(), WAIT_SECONDS) == 0
    kept = {path.name for path in (tmp_path / "storage" / "checkpoints").iterdir() if path.is_dir()}
    assert kept == {"step-000002"}
