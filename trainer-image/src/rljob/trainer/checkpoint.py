"""Checkpoints: STORAGE/checkpoints/step-000020 is a Hugging Face directory with the optimizer's state beside it.

    config.json, tokenizer files…   copied from the initial model
    model.safetensors               float32, Hugging Face names
    trainer.json                    TrainerState
    trainer/optimizer.safetensors   exp_avg.NAME, exp_avg_sq.NAME, float32; in a subdirectory, because engines read
                                    every *.safetensors of a model's directory as weights

With several ranks the last two kinds are model-00001-of-00002.safetensors … and model.safetensors.index.json, the same
for the optimizer: every rank writes the tensors that it holds (:mod:`rljob.trainer.checkpoint_parts`). They are whole
tensors, so a checkpoint can be resumed on any number of ranks.

A checkpoint is written under a temporary name. When all ranks have written and synced their files, rank 0 adds the
index and the record, and renames the directory, so a directory called step-N was complete. Only the highest incarnation
renames. trainer.json has the digests of all other files and its own; :mod:`rljob.trainer.checkpoint_choice` compares
them before a checkpoint is loaded.
"""

from __future__ import annotations

import fcntl
import json
import logging
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import EllipsisType

import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rljob.protocol.checkpoint_files import (
    DIRECTORY,
    OPTIMIZER_FILE,
    STATE_FILE,
    WEIGHTS_FILE,
    checkpoint_directories,
    directory_name,
    index_name,
    is_complete,
)
from rljob.protocol.checkpoint_record import TrainerState, encode_state, read_state_file
from rljob.protocol.full_disk import FULL_DISK
from rljob.protocol.sync_path import sync_path
from rljob.trainer.backends.base import SavedState
from rljob.trainer.checkpoint_parts import PartPlan, plan_parts, write_part
from rljob.trainer.errors import ModelError, NoRoomError, SupersededError
from rljob.trainer.process_group import World

log = logging.getLogger(__name__)

NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
RUN_ID_FILE = "run-id"
"""In the storage, beside the checkpoints, because it must survive their loss."""
REMOVED = "tmp-removed"
REFUSED = "refused"
_RUN_ID = re.compile(r"run-[0-9a-f]{16}")
_LEFTOVER = re.compile(r"step-\d{6,}\.(tmp|old)-.+")


class CheckpointStore:
    """The checkpoints of a run.

    Args:
        storage: the job's storage.
    """

    def __init__(self, storage: Path) -> None:
        self._storage = storage
        self.directory = storage / DIRECTORY
        self._warned = False

    def path(self, step: int) -> Path:
        """Return the directory of the checkpoint of ``step``."""
        return self.directory / directory_name(step)

    def relative(self, step: int) -> str:
        """Return that path relative to the storage."""
        return str(self.path(step).relative_to(self._storage))

    def has(self, step: int) -> bool:
        """Return whether there is a complete checkpoint of ``step``."""
        return is_complete(self.path(step))

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, damaged ones included, oldest first."""
        return sorted(checkpoint_directories(self.directory))

    def clean(self) -> None:
        """Remove incomplete files of a crash; restore a checkpoint whose replacement was interrupted."""
        if not self.directory.is_dir():
            return
        for path in self.directory.iterdir():
            if not _LEFTOVER.fullmatch(path.name):
                continue
            target = self.directory / path.name.partition(".")[0]
            if ".old-" in path.name and not target.exists():
                path.rename(target)
            else:
                self._delete(path)

    def run_id(self) -> str:
        """Return the id of the run, and give it one if it has none. No other run has it; every process of the run gets
        the same.

        Raises:
            ModelError: its file is damaged.
            NoRoomError: the disk is full.
        """
        file = self._storage / RUN_ID_FILE
        with self._needing_room(f"{RUN_ID_FILE} of spec.checkpoints.uri"):
            self.directory.mkdir(parents=True, exist_ok=True)
            with self._locked():
                if not file.exists():
                    new = file.with_name(f".{file.name}.new")
                    new.write_text(f"run-{secrets.token_hex(8)}")
                    sync_path(new)
                    new.rename(file)
                    sync_path(self._storage)
                run = file.read_bytes().decode(errors="replace")
        if not _RUN_ID.fullmatch(run):
            raise ModelError(
                f"{file} is damaged; write into it the name of this run's directory in spec.checkpoints.uri, or remove "
                "the file if there is none"
            )
        return run

    def claim(self, incarnation: int) -> None:
        """Reject all lower incarnations from now on.

        Raises:
            SupersededError: a higher incarnation has claimed the checkpoints.
            NoRoomError: the disk is full.
        """
        with self._needing_room("the file of the trainer's incarnation"):
            self.directory.mkdir(parents=True, exist_ok=True)
            with self.exclusive(incarnation):
                # Written apart and renamed: a full disk must not truncate the existing file.
                new = self.directory / "incarnation.new"
                new.write_text(str(incarnation))
                new.rename(self.directory / "incarnation")

    @contextmanager
    def exclusive(self, incarnation: int) -> Iterator[None]:
        """Keep other processes from claiming or changing the checkpoints.

        Raises:
            SupersededError: a higher incarnation has claimed the checkpoints.
        """
        with self._locked():
            file = self.directory / "incarnation"
            highest = int(file.read_text() or 0) if file.exists() else 0
            if incarnation < highest:
                raise SupersededError(f"incarnation {highest} has taken over the checkpoints from {incarnation}")
            yield

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def write(self, world: World, state: TrainerState, configuration: dict[str, bytes], saved: SavedState) -> None:
        """Write the checkpoint of ``state.step``, durable on return. It replaces an existing one. All ranks call this
        together, and all raise the same error.

        Args:
            world: the ranks; in a thread with a control group of its own.
            state: its ``files`` and ``digest`` are set on rank 0.
            configuration: see :func:`read_configuration`.
            saved: the tensors that this rank holds.

        Raises:
            SupersededError: a higher incarnation has taken over; the files of the attempt are removed.
            NoRoomError: the disk is full; the same.
        """
        nonce = world.broadcast(secrets.token_hex(4).encode() if world.rank == 0 else None).decode()
        target = self.path(state.step)
        suffix = f"{state.incarnation}-{nonce}"
        temporary = self.directory / f"{target.name}.tmp-{suffix}"
        what = f"the checkpoint of step {state.step}"
        plans = _plan(world, saved)

        def write_own() -> dict[str, str]:
            with self._needing_room(what):
                temporary.mkdir(parents=True, exist_ok=True)
                return {
                    name: digest
                    for plan, tensors in zip(plans, (saved.weights, saved.optimizer), strict=True)
                    for name, digest in write_part(temporary, plan, world.rank, tensors).items()
                }

        def finish() -> None:
            if world.rank != 0:
                return
            with self._needing_room(what):
                _complete(temporary, state, [configuration, *(plan.index() for plan in plans)], written)
            with self.exclusive(state.incarnation):
                if target.exists():
                    target.rename(self.directory / f"{target.name}.old-{suffix}")
                temporary.rename(target)
                sync_path(self.directory)

        try:
            written = world.agree(write_own)
            world.agree(finish)
        except (NoRoomError, SupersededError):
            if world.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        if world.rank == 0:
            self._delete(self.directory / f"{target.name}.old-{suffix}")

    def refuse(self, step: int, incarnation: int) -> Path:
        """Set aside the checkpoint of ``step``, so that no process loads it; return its new path.

        Raises:
            SupersededError: a higher incarnation has taken over.
        """
        aside = self.directory / f"{self.path(step).name}.{REFUSED}-{secrets.token_hex(4)}"
        with self.exclusive(incarnation):
            self.path(step).rename(aside)
            sync_path(self.directory)
        return aside

    @contextmanager
    def _needing_room(self, content: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            raise NoRoomError(f"{content} does not fit the disk of {self.directory} ({error}); make room") from None

    def remove(self, steps: list[int], incarnation: int) -> None:
        """Delete the checkpoints of ``steps`` that exist, and directories that could not be deleted before.

        Raises:
            SupersededError: a higher incarnation has taken over; it may need these checkpoints.
        """
        with self.exclusive(incarnation):
            for step in steps:
                if self.path(step).exists():
                    removed = self.directory / f"{self.path(step).name}.{REMOVED}-{secrets.token_hex(4)}"
                    self.path(step).rename(removed)  # first: a partly deleted directory must never look complete
        for removed in self.directory.glob(f"*.{REMOVED}-*"):
            self._delete(removed)

    def _delete(self, directory: Path) -> None:
        """Delete a directory as far as possible. On NFS an open file, for example of an export, and its directory
        remain until the file is closed."""
        shutil.rmtree(directory, ignore_errors=True)
        if directory.exists() and not self._warned:
            self._warned = True
            log.warning("%s cannot be deleted yet because a file in it is open; it is deleted later", directory)


def read_state(checkpoint: Path) -> TrainerState:
    """Return trainer.json of a checkpoint.

    Raises:
        ModelError: the file is missing or damaged.
    """
    try:
        return read_state_file(checkpoint)
    except ValueError as error:
        raise ModelError(str(error)) from None


def read_optimizer_tensor(checkpoint: Path, name: str, rows: slice | EllipsisType = ...) -> Tensor:
    """Return one tensor of the optimizer of a checkpoint, for example ``exp_avg.model.norm.weight``, or some of its
    rows: no others are read. It is mapped from the file.

    Raises:
        ModelError: the tensor cannot be read.
    """
    path = checkpoint / OPTIMIZER_FILE
    index = checkpoint / index_name(OPTIMIZER_FILE)
    try:
        if index.exists():
            path = path.with_name(_files_of(index)[name])
        with safe_open(path, "pt") as file:
            content: Tensor = file.get_slice(name)[rows]
            return content
    except (FileNotFoundError, SafetensorError, ValueError, KeyError) as error:
        raise ModelError(f"{name} cannot be read from {path} ({error!r})") from None


def optimizer_files(checkpoint: Path) -> list[Path]:
    """Return the files with the tensors of the optimizer of a checkpoint.

    Raises:
        ModelError: their index cannot be read.
    """
    index = checkpoint / index_name(OPTIMIZER_FILE)
    if not index.exists():
        return [checkpoint / OPTIMIZER_FILE]
    try:
        names = _files_of(index).values()
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{index} cannot be read ({error!r})") from None
    return [index.with_name(name) for name in sorted(set(names))]


def _files_of(index: Path) -> Mapping[str, str]:
    """Return the names of the tensors in an index, and the files that hold them."""
    return _parsed_index(index, index.stat().st_mtime_ns)


@lru_cache(maxsize=1)
def _parsed_index(index: Path, modified: int) -> Mapping[str, str]:
    """Return the content of an index; it is asked for each of tens of thousands of tensors of experts."""
    found: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
    return found


def optimizer_names(checkpoint: Path) -> set[str]:
    """Return the names of the tensors of the optimizer of a checkpoint.

    Raises:
        ModelError: a file cannot be read.
    """
    index, path = checkpoint / index_name(OPTIMIZER_FILE), checkpoint / OPTIMIZER_FILE
    try:
        if index.exists():
            return set(_files_of(index))
        with safe_open(path, "pt") as file:
            return set(file.keys())
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise ModelError(f"{path} cannot be read ({error!r})") from None


def read_configuration(source: Path) -> dict[str, bytes]:
    """Return the files of a Hugging Face directory besides weights, by name: configuration, tokenizer."""
    return {
        path.name: path.read_bytes()
        for path in source.iterdir()
        if path.is_file() and path.suffix not in NOT_COPIED and path.name != STATE_FILE and ".index." not in path.name
    }


def _plan(world: World, saved: SavedState) -> list[PartPlan]:
    """Return the files of the weights and of the optimizer. All ranks call this together."""
    tensors = (saved.weights, saved.optimizer)
    sizes = world.gather([{name: tensor.nbytes for name, tensor in kind.items()} for kind in tensors])
    return [plan_parts(file, [own[i] for own in sizes]) for i, file in enumerate((WEIGHTS_FILE, OPTIMIZER_FILE))]


def _complete(
    directory: Path, state: TrainerState, others: list[dict[str, bytes]], written: list[dict[str, str]]
) -> None:
    """Write the files besides tensors, the record last, and make all durable.

    Args:
        directory: of the checkpoint.
        state: its ``files`` and ``digest`` are set.
        others: name → content.
        written: by rank: name → digest of the files with tensors.
    """
    contents = {name: content for files in others for name, content in files.items()}
    digests = {name: blake3.blake3(content).hexdigest() for name, content in contents.items()}
    state.files = digests | {name: digest for files in written for name, digest in files.items()}
    contents[STATE_FILE] = encode_state(state)
    for name, content in contents.items():
        (directory / name).write_bytes(content)
        sync_path(directory / name)
    for path in (directory / OPTIMIZER_FILE).parent, directory:
        sync_path(path)
