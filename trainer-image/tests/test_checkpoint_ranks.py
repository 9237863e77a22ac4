"""Several ranks write one checkpoint: complete or absent, whichever rank fails, and checked as a whole."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import on_ranks
from safetensors.torch import load_file

from rljob.protocol.checkpoint_record import TrainerState
from rljob.trainer import checkpoint_parts, checkpoint_writer
from rljob.trainer.backends.base import SavedState
from rljob.trainer.checkpoint import CheckpointStore, read_optimizer_tensor, read_state
from rljob.trainer.checkpoint_choice import choose_checkpoint
from rljob.trainer.checkpoint_parts import plan_parts
from rljob.trainer.checkpoint_writer import CheckpointWriter
from rljob.trainer.errors import ModelError, NoRoomError, SupersededError
from rljob.trainer.process_group import World

ALONE = World(0, 1, torch.device("cpu"), None, 0, 1)  # type: ignore[arg-type]
PARTS = [f"{stem}-0000{part}-of-00002.safetensors" for stem in ("model", "trainer/optimizer") for part in (1, 2)]
INDEXES = ["model.safetensors.index.json", "trainer/optimizer.safetensors.index.json"]


def write(world: World, storage: Path, step: int = 2, incarnation: int = 1) -> None:
    """Write a checkpoint of one tensor of each rank, and of one that all have."""
    weights = {f"w{world.rank}": torch.full((40, 3), float(world.rank)), "shared": torch.full((2,), float(world.rank))}
    saved = SavedState(weights, {f"exp_avg.{name}": tensor + 1 for name, tensor in weights.items()})
    state = TrainerState(step, step, incarnation, {"torch": "0"}, {})
    CheckpointStore(storage).write(world, state, {"config.json": b'{"a": 1}'}, saved)


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Storage with checkpoints of steps 2 and 4, written by two ranks."""
    storage = tmp_path_factory.mktemp("storage")
    for step in (2, 4):
        on_ranks(2, write, storage, step)
    return storage


def directories(storage: Path) -> set[str]:
    return {path.name for path in (storage / "checkpoints").iterdir() if path.is_dir()}


def test_each_rank_writes_its_tensors_and_the_index_names_their_files(of_two_ranks):
    checkpoint = of_two_ranks / "checkpoints" / "step-000004"
    assert sorted(read_state(checkpoint).files) == sorted(["config.json", *PARTS, *INDEXES])
    parts = [load_file(checkpoint / name) for name in PARTS]
    assert [sorted(part) for part in parts[:2]] == [["shared", "w0"], ["w1"]]
    assert parts[0]["shared"].tolist() == [0.0, 0.0], "of the first rank"
    index = json.loads((checkpoint / INDEXES[0]).read_bytes())
    assert index["weight_map"] == {"shared": PARTS[0], "w0": PARTS[0], "w1": PARTS[1]}
    assert index["metadata"] == {"total_size": 4 * (2 + 2 * 120)}
    for name, value in (("w0", 1.0), ("w1", 2.0), ("shared", 1.0)):
        assert read_optimizer_tensor(checkpoint, f"exp_avg.{name}").unique().tolist() == [value]
    with pytest.raises(ModelError, match=r"exp_avg\.other cannot be read from"):
        read_optimizer_tensor(checkpoint, "exp_avg.other")
    assert directories(of_two_ranks) == {"step-000002", "step-000004"}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [flip, Path.unlink])
@pytest.mark.parametrize("name", [*PARTS, *INDEXES])
def test_a_checkpoint_with_one_damaged_part_is_refused(of_two_ranks, tmp_path, name, damage):
    shutil.copytree(of_two_ranks, tmp_path, dirs_exist_ok=True)
    checkpoints = CheckpointStore(tmp_path)
    damage(checkpoints.path(4) / name)
    chosen = choose_checkpoint(checkpoints, ALONE)
    assert chosen.path == checkpoints.path(2)
    (refused,) = chosen.refused
    assert refused.reason.startswith(f"{checkpoints.path(4) / name} is ")


def test_ranks_without_tensors_write_no_file_and_a_single_part_needs_no_index():
    plan = plan_parts("model.safetensors", [{}, {"a": 4, "b": 8}, {"b": 8}])
    assert plan.ranks == {1: "model.safetensors"} and plan.size == 12 and plan.index() == {}
    plan = plan_parts("trainer/optimizer.safetensors", [{}, {}])
    assert plan.ranks == {0: "trainer/optimizer.safetensors"} and plan.index() == {}


def failing(world: World, storage: Path, rank: int, number: int) -> str:
    """Write a checkpoint, with an error of the disk on one rank in its second file."""
    calls = []
    write_tensors = checkpoint_parts.write_tensors

    def fail(path: Path, tensors: Any) -> str:
        calls.append(path)
        if world.rank == rank and len(calls) == 2:
            raise OSError(number, os.strerror(number))
        return write_tensors(path, tensors)

    with mock.patch.object(checkpoint_parts, "write_tensors", fail):
        try:
            write(world, storage)
        except (NoRoomError, OSError) as error:
            return f"{type(error).__name__}: {error}"
    return "written"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_of_one_rank_is_an_error_of_all_and_leaves_no_files(tmp_path, rank):
    results = on_ranks(2, failing, tmp_path, rank, errno.ENOSPC)
    assert results[0] == results[1] and results[0].startswith("NoRoomError: the checkpoint of step 2 does not fit")
    assert directories(tmp_path) == set()


def test_another_error_of_the_disk_of_one_rank_is_an_error_of_all(tmp_path):
    results = on_ranks(2, failing, tmp_path, 1, errno.EIO)
    assert results == ["OSError: [Errno 5] Input/output error"] * 2
    CheckpointStore(tmp_path).clean()
    assert directories(tmp_path) == set()


def superseded(world: World, storage: Path) -> bool:
    try:
        write(world, storage, incarnation=1)
    except SupersededError:
        return True
    return False


def test_a_lower_incarnation_of_several_ranks_cannot_write(tmp_path):
    CheckpointStore(tmp_path).claim(2)
    assert on_ranks(2, superseded, tmp_path) == [True, True]
    assert directories(tmp_path) == set()


def dying(world: World, storage: Path, call: int) -> str:
    """Write a checkpoint; rank 1 ends at its ``call``-th file or synchronization, and with it its connections."""
    calls = 0

    def wrap(function: Any) -> Any:
        def wrapped(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if world.rank == 1 and calls == call:
                raise KeyboardInterrupt
            return function(*arguments)

        return wrapped

    with (
        mock.patch.object(checkpoint_parts, "write_tensors", wrap(checkpoint_parts.write_tensors)),
        mock.patch.object(checkpoint_parts, "sync_path", wrap(checkpoint_parts.sync_path)),
    ):
        try:
            write(world, storage)
        except (KeyboardInterrupt, RuntimeError) as error:
            return type(error).__name__
    return "written"


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_a_rank_that_dies_before_its_files_are_durable_leaves_no_checkpoint(tmp_path, call):
    assert on_ranks(2, dying, tmp_path, call) == ["RuntimeError", "KeyboardInterrupt"]
    checkpoints = CheckpointStore(tmp_path)
    assert checkpoints.steps() == []
    checkpoints.clean()
    assert directories(tmp_path) == set()


def retrying(world: World, storage: Path, attempts: int, closing: int | None) -> list[str]:
    """Write a checkpoint in the background while the disk of rank 1 is full; return the calls of the writer."""
    calls: list[str] = []
    left = attempts if world.rank == 1 else 0
    write_tensors = checkpoint_parts.write_tensors

    def full(path: Path, tensors: Any) -> str:
        nonlocal left
        if left:
            left -= 1
            raise OSError(errno.ENOSPC, "no space")
        return write_tensors(path, tensors)

    background = world.with_own_control()
    writer = CheckpointWriter(background, lambda reason: calls.append(reason[:22]), lambda error: None, lambda: None)
    with mock.patch.object(checkpoint_parts, "write_tensors", full):
        writer.start(2, lambda: write(background, storage), lambda: calls.append("done"))
        world.gather("the main thread uses its own group meanwhile")
        if closing == world.rank:
            writer.close()
        writer.join()
    return calls


def test_all_ranks_repeat_a_write_that_did_not_fit_the_disk_of_one(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "FIRST_RETRY_SECONDS", 1e-3)
    waits = ["the checkpoint of step"] * 2
    assert on_ranks(2, retrying, tmp_path, 2, None) == [[*waits, "", "done"]] * 2
    assert directories(tmp_path) == {"step-000002"}
    assert choose_checkpoint(CheckpointStore(tmp_path), ALONE).refused == []


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_give_up_a_write_that_does_not_fit_when_one_ends(tmp_path, rank):
    results = on_ranks(2, retrying, tmp_path, 1000, rank)
    assert all("done" not in calls and "" not in calls for calls in results)
    assert directories(tmp_path) == set()
