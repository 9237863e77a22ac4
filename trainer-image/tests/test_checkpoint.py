"""Checkpoints: complete or absent, wherever the process dies."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
from pathlib import Path

import blake3
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from rljob.protocol.checkpoint_record import TrainerState, find_damage
from rljob.trainer import checkpoint as module
from rljob.trainer import checkpoint_parts, tensor_file
from rljob.trainer.backends.base import SavedState
from rljob.trainer.checkpoint import (
    CheckpointStore,
    read_configuration,
    read_optimizer_tensor,
    read_state,
)
from rljob.trainer.errors import NoRoomError, SupersededError
from rljob.trainer.process_group import World
from rljob.trainer.tensor_file import write_tensors

ALONE = World(0, 1, torch.device("cpu"), None, 0, 1)  # type: ignore[arg-type]


def state(step: int, incarnation: int = 1) -> TrainerState:
    return TrainerState(step, step, incarnation, {"torch": "0"}, {})


def write(checkpoints: CheckpointStore, step: int, value: float = 0.0, incarnation: int = 1) -> None:
    weights = {"w": torch.full((2, 3), value)}
    saved = SavedState(weights, {"exp_avg.w": torch.ones(2, 3)})
    checkpoints.write(ALONE, state(step, incarnation), {"config.json": b"{}"}, saved)


def names(checkpoints: CheckpointStore) -> set[str]:
    return {path.name for path in checkpoints.directory.iterdir() if path.is_dir()}


def test_a_checkpoint_is_read_as_it_was_written(tmp_path):
    checkpoints = CheckpointStore(tmp_path)
    assert checkpoints.steps() == []
    for step in (9, 100, 20):
        write(checkpoints, step, value=step)
    path = tmp_path / "checkpoints" / "step-000100"
    assert checkpoints.steps() == [9, 20, 100] and checkpoints.path(100) == path
    found = read_state(path)
    assert (found.step, found.updates, found.incarnation) == (100, 100, 1)
    assert list(found.files) == ["config.json", "model.safetensors", "trainer/optimizer.safetensors"]
    assert find_damage(path, found.files) == ""
    assert load_file(path / "model.safetensors")["w"].tolist() == [[100.0] * 3] * 2
    assert read_optimizer_tensor(path, "exp_avg.w").tolist() == [[1.0] * 3] * 2
    assert read_optimizer_tensor(path, "exp_avg.w", slice(1, 2)).tolist() == [[1.0] * 3]
    assert checkpoints.relative(100) == "checkpoints/step-000100"


@pytest.mark.parametrize("call", range(13))
@pytest.mark.parametrize("existing", [False, True])
def test_a_crash_at_any_point_leaves_a_complete_checkpoint_or_none(tmp_path, monkeypatch, call, existing):
    checkpoints = CheckpointStore(tmp_path)
    if existing:
        write(checkpoints, 5, value=1)
    calls = 0

    def dying(function):
        def wrapped(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls > call:
                raise KeyboardInterrupt
            return function(*args, **kwargs)

        return wrapped

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_parts, "write_tensors", dying(checkpoint_parts.write_tensors))
        patch.setattr(checkpoint_parts, "sync_path", dying(checkpoint_parts.sync_path))
        patch.setattr(module, "sync_path", dying(module.sync_path))
        patch.setattr(Path, "rename", dying(Path.rename))
        patch.setattr(module.shutil, "rmtree", dying(module.shutil.rmtree))
        with contextlib.suppress(KeyboardInterrupt):
            write(checkpoints, 5, value=2)
    checkpoints.clean()
    if existing or checkpoints.has(5):
        path = checkpoints.path(5)
        values = load_file(path / "model.safetensors")["w"]
        assert values.unique().tolist() in ([1.0], [2.0])
        assert find_damage(path, read_state(path).files) == ""
    assert names(checkpoints) <= {"step-000005"}


@pytest.fixture
def room():
    """Function that limits the size of files, in bytes, that this process can write, to simulate a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("size", [0, 1, 150])  # the configuration, the state and the weights do not fit
def test_a_checkpoint_that_does_not_fit_leaves_no_files_and_can_be_retried(tmp_path, room, size):
    checkpoints = CheckpointStore(tmp_path)
    checkpoints.claim(1)
    write(checkpoints, 1)
    room(size)
    with pytest.raises(
        NoRoomError, match=f"checkpoint of step 2 does not fit the disk of {checkpoints.directory} .*room"
    ):
        write(checkpoints, 2)
    if size == 0:
        with pytest.raises(NoRoomError, match="file of the trainer's incarnation does not fit"):
            checkpoints.claim(9)
    room(1 << 30)
    assert names(checkpoints) == {"step-000001"}
    assert (checkpoints.directory / "incarnation").read_text() == "1"
    write(checkpoints, 2)
    assert names(checkpoints) == {"step-000001", "step-000002"}


def test_other_errors_of_the_disk_are_raised(tmp_path, monkeypatch):
    def broken(path):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(module, "sync_path", broken)
    with pytest.raises(OSError, match="Input/output"):
        write(CheckpointStore(tmp_path), 2)


def test_a_checkpoint_replaces_one_of_the_same_step(tmp_path):
    checkpoints = CheckpointStore(tmp_path)
    write(checkpoints, 3, value=1)
    write(checkpoints, 3, value=2, incarnation=2)
    assert load_file(checkpoints.path(3) / "model.safetensors")["w"][0, 0] == 2
    assert read_state(checkpoints.path(3)).incarnation == 2
    assert names(checkpoints) == {"step-000003"}


def test_a_refused_checkpoint_is_set_aside_by_the_highest_incarnation_only(tmp_path):
    checkpoints = CheckpointStore(tmp_path)
    write(checkpoints, 3, incarnation=2)
    checkpoints.claim(2)
    with pytest.raises(SupersededError):
        checkpoints.refuse(3, 1)
    assert checkpoints.has(3)
    aside = checkpoints.refuse(3, 2)
    checkpoints.clean()
    assert checkpoints.steps() == [] and find_damage(aside, read_state(aside).files) == ""


def test_tensors_of_every_type_are_written_as_safetensors_with_the_digest_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", 7)  # chunks that end inside an element
    tensors = {str(dtype): torch.arange(5).to(dtype).reshape(1, 5) for dtype in tensor_file.DTYPES}
    tensors |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(4.5), "strided": torch.arange(6.0).view(2, 3).T}
    path = tmp_path / "t.safetensors"
    assert write_tensors(path, tensors) == blake3.blake3(path.read_bytes()).hexdigest()
    read = load_file(path)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in tensors.items())
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_lower_incarnation_can_no_longer_write(tmp_path):
    checkpoints = CheckpointStore(tmp_path)
    checkpoints.claim(2)
    checkpoints.claim(2)
    with pytest.raises(SupersededError):
        checkpoints.claim(1)
    with pytest.raises(SupersededError):
        write(checkpoints, 4, incarnation=1)
    assert not checkpoints.has(4)
    write(checkpoints, 2, incarnation=2)
    with pytest.raises(SupersededError):
        checkpoints.remove([2], 1)
    assert checkpoints.has(2)
    write(checkpoints, 4, incarnation=3)
    assert checkpoints.has(4)


def test_removed_checkpoints_are_gone_and_unknown_ones_ignored(tmp_path):
    checkpoints = CheckpointStore(tmp_path)
    write(checkpoints, 1)
    write(checkpoints, 2)
    checkpoints.remove([1, 7], 1)
    assert names(checkpoints) == {"step-000002"}


def test_everything_but_weights_is_copied(tmp_path):
    for name in ("config.json", "vocab.json", "merges.txt", "model.safetensors", "model.safetensors.index.json"):
        (tmp_path / name).write_text(name)
    assert read_configuration(tmp_path).keys() == {"config.json", "vocab.json", "merges.txt"}


def test_a_directory_that_cannot_be_deleted_yet_is_deleted_later(tmp_path, monkeypatch, caplog):
    """NFS keeps a directory in which a file is open: a user exports the checkpoint."""
    checkpoints = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        write(checkpoints, step)
    delete = os.rmdir

    def in_use(path, *arguments, **more):
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    monkeypatch.setattr(os, "rmdir", in_use)
    checkpoints.remove([1], 1)
    checkpoints.remove([2], 1)
    CheckpointStore(tmp_path).clean()
    assert not checkpoints.has(1) and not checkpoints.has(2) and checkpoints.has(3)
    assert caplog.text.count("cannot be deleted yet") == 2  # once per trainer process
    monkeypatch.setattr(os, "rmdir", delete)
    checkpoints.remove([], 1)
    assert sorted(path.name for path in checkpoints.directory.iterdir() if path.is_dir()) == ["step-000003"]
