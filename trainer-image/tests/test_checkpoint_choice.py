"""A damaged checkpoint is never loaded: the one before it is, or the trainer ends with a sentence."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks

from rljob.protocol.checkpoint_record import TrainerState, encode_state
from rljob.trainer import checkpoint_choice
from rljob.trainer.backends.base import SavedState
from rljob.trainer.checkpoint import CheckpointStore
from rljob.trainer.checkpoint_choice import choose_checkpoint
from rljob.trainer.errors import ModelError
from rljob.trainer.process_group import World

ALONE = World(0, 1, torch.device("cpu"), None, 0, 1)  # type: ignore[arg-type]
FILES = ["config.json", "model.safetensors", "trainer/optimizer.safetensors", "trainer.json"]


def write(storage: Path, *steps: int) -> CheckpointStore:
    checkpoints = CheckpointStore(storage)
    for step in steps:
        tensors = {"w": torch.full((40, 3), float(step))}
        state = TrainerState(step, step, 1, {"torch": "0"}, {})
        checkpoints.write(ALONE, state, {"config.json": b'{"a": 1}'}, SavedState(tensors, {"exp_avg.w": tensors["w"]}))
    return checkpoints


def flip(path: Path, position: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def unreadable(path: Path) -> None:
    path.unlink()
    path.mkdir()  # reading it fails with an OSError, for every user


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "flipped": lambda path: flip(path, path.stat().st_size // 2),
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b" x"),
    "empty": lambda path: os.truncate(path, 0),
    "missing": lambda path: path.unlink(),
    "unreadable": unreadable,
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_with_a_damaged_file_is_refused_and_the_one_before_it_is_taken(tmp_path, name, damage):
    checkpoints = write(tmp_path, 2, 4)
    path = checkpoints.path(4) / name
    DAMAGES[damage](path)
    chosen = choose_checkpoint(checkpoints, ALONE)
    assert (chosen.path, chosen.state.step) == (checkpoints.path(2), 2)
    (refused,) = chosen.refused
    word = {"missing": "is missing", "unreadable": "cannot be read"}.get(damage, "is damaged")
    assert refused.step == 4 and refused.reason.startswith(f"{path} {word}")
    assert checkpoints.steps() == [2, 4], "another process may still need it"


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "trainer/optimizer.safetensors.index.json"])
def test_a_checkpoint_with_an_index_that_its_record_does_not_list_is_refused(tmp_path, name):
    checkpoints = write(tmp_path, 2, 4)
    (checkpoints.path(4) / name).write_text('{"weight_map": {}}')
    chosen = choose_checkpoint(checkpoints, ALONE)
    assert chosen.path == checkpoints.path(2)
    (refused,) = chosen.refused
    assert refused.reason == f"{checkpoints.path(4)}/{name} is not in trainer.json: remove it"


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_noticed_unless_it_changes_nothing(tmp_path, name):
    checkpoints = write(tmp_path, 2)
    path = checkpoints.path(2) / name
    original, record = path.read_bytes(), choose_checkpoint(checkpoints, ALONE).state
    for position in range(len(original)):
        flip(path, position, bit=position % 8)
        with pytest.raises(ModelError, match=f"{path} is damaged"):
            choose_checkpoint(checkpoints, ALONE)
        path.write_bytes(original)
    assert choose_checkpoint(checkpoints, ALONE).state == record


def test_without_a_checkpoint_the_initial_model_is_taken_and_without_a_valid_one_nothing(tmp_path):
    assert choose_checkpoint(CheckpointStore(tmp_path), ALONE) == checkpoint_choice.CheckpointChoice(None, None, [])
    checkpoints = write(tmp_path, 2, 4, 6)
    for step in (2, 4, 6):
        (checkpoints.path(step) / "model.safetensors").unlink()
    with pytest.raises(ModelError) as error:
        choose_checkpoint(checkpoints, ALONE)
    newest = checkpoints.path(6) / "model.safetensors"
    assert str(error.value) == (
        f"no checkpoint can be used: {newest} is missing (also damaged: step 4, 2); restore the file from a copy, or "
        "start another run"
    )


def test_a_checkpoint_of_another_step_is_refused(tmp_path):
    checkpoints = write(tmp_path, 2)
    shutil.copytree(checkpoints.path(2), checkpoints.path(8))
    chosen = choose_checkpoint(checkpoints, ALONE)
    assert chosen.state.step == 2 and "holds the checkpoint of step 2" in chosen.refused[0].reason


def test_a_rewritten_record_does_not_hide_damage_of_itself(tmp_path):
    """A record whose content was changed must have been sealed again, which no damage does."""
    checkpoints = write(tmp_path, 2)
    path = checkpoints.path(2) / "trainer.json"
    state = choose_checkpoint(checkpoints, ALONE).state
    path.write_bytes(encode_state(state).replace(b'"updates": 2', b'"updates": 3'))
    with pytest.raises(ModelError, match="it does not have its own digest"):
        choose_checkpoint(checkpoints, ALONE)


def test_a_checkpoint_that_the_previous_process_removes_meanwhile_is_not_refused(tmp_path, monkeypatch):
    checkpoints = write(tmp_path, 2, 4)
    find_damage = checkpoint_choice.find_damage

    def removed_meanwhile(path, files):
        if path == checkpoints.path(4):
            checkpoints.remove([4], 1)
            write(tmp_path, 6)
        return find_damage(path, files)

    monkeypatch.setattr(checkpoint_choice, "find_damage", removed_meanwhile)
    chosen = choose_checkpoint(checkpoints, ALONE)
    assert chosen.state.step == 6 and chosen.refused == []


def choose(world: World, storage: Path, failing: dict[int, int]) -> tuple[int | None, list[Any]]:
    """Choose a checkpoint; rank ``failing[step]`` cannot read the weights of ``step``."""
    checkpoint_choice.find_damage = lambda path, files: (
        f"is unreadable by rank {world.rank}" if failing.get(int(path.name[5:])) == world.rank else ""
    )
    chosen = choose_checkpoint(CheckpointStore(storage), world)
    return chosen.state.step if chosen.state else None, [(refused.step, refused.reason) for refused in chosen.refused]


def test_all_ranks_refuse_what_one_rank_cannot_read(tmp_path):
    write(tmp_path, 2, 4, 6)
    results = on_ranks(2, choose, tmp_path, {4: 0, 6: 1})
    directory = tmp_path / "checkpoints"
    reasons = [
        (6, f"{directory}/step-000006/is unreadable by rank 1"),
        (4, f"{directory}/step-000004/is unreadable by rank 0"),
    ]
    assert results == [(2, reasons)] * 2


def of_machine(local_rank: int, local_size: int) -> World:
    return replace(ALONE, local_rank=local_rank, local_size=local_size)


@pytest.mark.parametrize("local_size", [1, 2, 3, 9])
def test_ranks_of_a_machine_share_the_files_and_leave_none_out(local_size):
    files = {f"{stem}-0000{part}-of-00003.safetensors": "" for stem in ("model", "optimizer") for part in (1, 2, 3)}
    shares = [checkpoint_choice._share(files, of_machine(rank, local_size)) for rank in range(local_size)]
    assert sorted(name for share in shares for name in share) == sorted(files)
    assert max(map(len, shares)) == -(-len(files) // local_size)


def share_files(world: World, storage: Path) -> tuple[set[str], Any, Any]:
    """Return the files that this rank reads, and the step that is chosen: without damage, and if rank 1 sees another
    record of the newest checkpoint."""
    world, read = replace(world, local_rank=world.rank, local_size=world.size), set()
    find_damage, read_state_file = checkpoint_choice.find_damage, checkpoint_choice.read_state_file

    def noted(path: Path, files: Any) -> str:
        read.update(f"{path.name}/{name}" for name in files)
        return find_damage(path, files)

    def other_record(path: Path) -> TrainerState:
        state = read_state_file(path)
        state.digest += "0" if world.rank == 1 and state.step == 4 else ""
        return state

    checkpoint_choice.find_damage = noted
    chosen = choose_checkpoint(CheckpointStore(storage), world)
    checkpoint_choice.find_damage, checkpoint_choice.read_state_file = find_damage, other_record
    other = choose_checkpoint(CheckpointStore(storage), world)
    return (
        read,
        chosen.state.step if chosen.state else None,
        [(refused.step, refused.reason) for refused in other.refused],
    )


def test_damage_in_the_share_of_any_rank_is_damage_for_all(tmp_path):
    checkpoints = write(tmp_path, 2, 4, 6)
    flip(checkpoints.path(6) / "trainer/optimizer.safetensors", 100)
    (first, step, refused), (second, *others) = on_ranks(2, share_files, tmp_path)
    assert [step, refused] == others and step == 4
    assert refused[1] == (4, f"{checkpoints.path(4)} is not the same for all ranks")
    assert not first & second
    of_four = {name for name in first | second if name.startswith("step-000004/")}
    assert of_four == {f"step-000004/{name}" for name in FILES if name != "trainer.json"}
