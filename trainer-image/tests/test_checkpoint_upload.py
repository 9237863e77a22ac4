"""Checkpoints in S3: a checkpoint counts once its copy is complete, and a trainer without its files downloads it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from s3fs import S3FileSystem

from e2e.fakes.s3 import empty_bucket, serving_s3
from rljob.api.model_address import S3Model
from rljob.protocol import trainer_protocol as m
from rljob.protocol.checkpoint_copies import CopyError
from rljob.protocol.checkpoint_record import TrainerState
from rljob.protocol.s3_checkpoints import S3Checkpoints
from rljob.trainer.backends.base import SavedState
from rljob.trainer.checkpoint import CheckpointStore, read_state
from rljob.trainer.checkpoint_choice import choose_checkpoint
from rljob.trainer.checkpoint_upload import upload_checkpoint
from rljob.trainer.errors import ModelError, NoRoomError, SupersededError
from rljob.trainer.process_group import World

ALONE = World(0, 1, torch.device("cpu"), None, 0, 1)  # type: ignore[arg-type]
WAIT_SECONDS = 50
RUN, OTHER = "run-0123456789abcdef", "run-ffffffffffffffff"


@pytest.fixture(scope="module")
def server():
    with serving_s3() as variables:
        yield variables


@pytest.fixture
def files(server, monkeypatch):
    """An empty bucket called "run"."""
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(S3FileSystem, "retries", 1)
    return empty_bucket("run")


def opened() -> S3Checkpoints:
    return S3Checkpoints(S3Model("run", "a"), run=RUN)


def write(world: World, storage: Path, step: int, removed: list[int] = [], incarnation: int = 1) -> None:  # noqa: B006
    """Write and upload a checkpoint of one tensor of each rank."""
    checkpoints = CheckpointStore(storage)
    saved = SavedState({f"w{world.rank}": torch.full((40, 3), float(step))}, {})
    checkpoints.write(world, TrainerState(step, step, incarnation, {}, {}), {"config.json": b"{}"}, saved)
    upload_checkpoint(opened(), checkpoints, world, step, incarnation, removed)


def copied(files: S3FileSystem) -> set[str]:
    return {path.split("/")[3].rpartition("-")[0] for path in files.find("run/a")}


def damage(files: S3FileSystem, step: int) -> str:
    (path,) = (
        path for path in files.find("run/a") if f"step-{step:06d}" in path and path.endswith("model.safetensors")
    )
    content = bytearray(files.cat_file(path))
    content[-1] ^= 1
    files.pipe_file(path, bytes(content))
    return path


def test_the_newest_copy_without_damage_is_downloaded_if_the_storage_lacks_it(tmp_path, files):
    for step in (2, 4, 6):
        write(ALONE, tmp_path / "old", step)
    assert choose_checkpoint(CheckpointStore(tmp_path / "old"), ALONE, opened()).state.step == 6
    path = damage(files, 6)
    shutil.copytree(tmp_path / "old" / "checkpoints" / "step-000002", tmp_path / "new" / "checkpoints" / "step-000002")
    checkpoints = CheckpointStore(tmp_path / "new")
    chosen = choose_checkpoint(checkpoints, ALONE, opened())
    assert (chosen.path, chosen.state) == (checkpoints.path(4), read_state(tmp_path / "old/checkpoints/step-000004"))
    (refused,) = chosen.refused
    assert refused.step == 6 and refused.reason.startswith(f"s3://{path} is damaged")
    assert checkpoints.steps() == [2, 4]
    assert {entry.name for entry in checkpoints.directory.iterdir()} == {"step-000002", "step-000004"}


def test_copies_are_removed_with_their_checkpoints_and_only_by_the_highest_incarnation(tmp_path, files):
    write(ALONE, tmp_path, 2)
    write(ALONE, tmp_path, 4, removed=[2])
    assert copied(files) == {"step-000004"}
    CheckpointStore(tmp_path).claim(2)
    for step, removed in ((4, []), (4, [4])):
        with pytest.raises(SupersededError):
            upload_checkpoint(opened(), CheckpointStore(tmp_path), ALONE, step, 1, removed)
    assert opened().complete().keys() == {4}


def test_the_copies_of_another_run_are_neither_loaded_nor_deleted(tmp_path, files):
    """A run that was killed after step 4, and a later step of another run below the same address."""
    write(ALONE, tmp_path / "run", 4)
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    other = S3Checkpoints(S3Model("run", "a"), run=OTHER)
    checkpoints = CheckpointStore(tmp_path / "other")
    checkpoints.write(ALONE, TrainerState(6, 6, 1, {}, {}), {}, SavedState({"w": torch.ones(1)}, {}))
    upload_checkpoint(other, checkpoints, ALONE, 6, 1, [])
    assert choose_checkpoint(CheckpointStore(tmp_path / "run"), ALONE, opened()).state.step == 4
    write(ALONE, tmp_path / "run", 6, removed=[4])
    opened().remove([6], contextlib.nullcontext())  # as a refused start does
    assert other.complete().keys() == {6} and opened().complete() == {}
    assert choose_checkpoint(CheckpointStore(tmp_path / "new"), ALONE, opened()).refused == []


def test_a_run_keeps_its_id_when_its_checkpoints_are_lost_and_no_other_run_has_it(tmp_path):
    first = CheckpointStore(tmp_path / "a").run_id()
    assert CheckpointStore(tmp_path / "a").run_id() == first != CheckpointStore(tmp_path / "b").run_id()
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    assert CheckpointStore(tmp_path / "a").run_id() == first
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["checkpoints", "run-id"]


@pytest.mark.parametrize("content", [b"", b"run-0", b"run-0123456789abcdeX", b"run-0123456789abcdef/../x", b"\xff"])
def test_a_damaged_id_of_the_run_is_one_sentence(tmp_path, content):
    (tmp_path / "run-id").write_bytes(content)
    with pytest.raises(ModelError, match=rf"^{tmp_path}/run-id is damaged; write into it the name of this run's"):
        CheckpointStore(tmp_path).run_id()


def test_an_id_that_does_not_fit_the_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(path: Path, *_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(
            NoRoomError, match=r"^run-id of spec.checkpoints.uri does not fit the disk of .*; make room"
        ):
            CheckpointStore(tmp_path).run_id()
    assert not (tmp_path / "run-id").exists()
    assert CheckpointStore(tmp_path).run_id().startswith("run-")


def of_two_ranks(world: World, storage: Path, other: Path, variables: dict[str, str]) -> tuple[list[str], int | None]:
    """Upload with all ranks, then choose without local files; return the files that this rank uploaded."""
    os.environ.update(variables)  # ranks are forks of a process that started before the server
    uploaded = []
    put = S3FileSystem.put_file

    def recorded(self: S3FileSystem, local: str, remote: str) -> None:
        uploaded.append(remote.split("/", 4)[4])
        put(self, local, remote)

    S3FileSystem.put_file = recorded
    write(world, storage, 2)
    chosen = choose_checkpoint(CheckpointStore(other), world, opened())
    return uploaded, chosen.state.step if chosen.state else None


def test_each_rank_uploads_some_files_and_rank_0_downloads_for_all(tmp_path, files, server):
    (first, chosen), (second, also) = on_ranks(2, of_two_ranks, tmp_path / "storage", tmp_path / "other", server)
    assert chosen == also == 2
    record = read_state(tmp_path / "other" / "checkpoints" / "step-000002")
    assert sorted(first + second) == sorted([*record.files, "trainer.json"]) and len(first) > 1 < len(second)
    assert first[-1] == "trainer.json"


def test_an_unreachable_server_is_an_error_of_the_start(tmp_path, files, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    with pytest.raises(CopyError, match=r"cannot be reached at http://127.0.0.1:1 "):
        choose_checkpoint(CheckpointStore(tmp_path), ALONE, opened())


async def test_a_trainer_copies_waits_for_s3_and_resumes_from_the_copy(tmp_path, job, batch, coordinator, start, files):
    made = job(checkpoints={"uri": "s3://run/a"})
    coordinator.batches = {step: batch(seed=step, step=step) for step in range(4)}
    (process,) = await start(coordinator, made)
    await coordinator.admit()
    await coordinator.train(0)
    files.rm("run", recursive=True)  # the bucket is gone
    await coordinator.send(m.Checkpoint(1, 1, []))
    waits = await coordinator.receive(m.TrainerBlocked)
    assert "there is no bucket or prefix s3://run/a/; correct it" in waits.reason
    await coordinator.train(1)  # while the checkpoint waits
    files.mkdir("run")
    while (await coordinator.receive(m.TrainerBlocked)).reason:
        pass
    one = await coordinator.receive(m.Checkpointed)
    assert (one.step, copied(files)) == (1, {"step-000001"})
    await coordinator.send(m.Checkpoint(1, 2, [1]))
    two = await coordinator.receive(m.Checkpointed)
    assert (two.step, copied(files)) == (2, {"step-000002"})
    await coordinator.train(2)
    after = await coordinator.digest()

    process.kill()
    await process.wait()
    shutil.rmtree(tmp_path / "storage" / "checkpoints")
    (process,) = await start(coordinator, made)
    registered = await coordinator.admit(3)
    assert (registered.step, registered.digest) == (2, two.digest)
    await coordinator.train(2)
    assert await coordinator.digest() == after

    files.rm("run/a", recursive=True)  # a checkpoint that was not copied before its trainer died
    await coordinator.send(m.Checkpoint(2, 3, []))
    assert (await coordinator.receive(m.Checkpointed)).step == 3
    await coordinator.send(m.Stop("done"))
    assert await asyncio.wait_for(process.wait(), WAIT_SECONDS) == 0
    files.rm("run", recursive=True)
    (process,) = await start(coordinator, made)
    assert await asyncio.wait_for(process.wait(), WAIT_SECONDS) == 2, "there is no bucket"
    files.mkdir("run")
    (process,) = await start(coordinator, made)
    assert (await coordinator.admit(3)).step == 3
    await coordinator.send(m.Checkpoint(3, 3, []))
    assert (await coordinator.receive(m.Checkpointed)).step == 3
    assert copied(files) == {"step-000003"}
    await coordinator.send(m.RefuseCheckpoint(3, 3, "of another run"))
    assert await asyncio.wait_for(process.wait(), WAIT_SECONDS) == 1
    assert copied(files) == set(), "the next process does not download it again"
