"""Checkpoints: STORAGE/checkpoints/step-000020 is a Hugging Face directory with the optimizer's state beside it.

    config.json, tokenizer files…   copied from the initial model
    model.safetensors               float32, Hugging Face names
    trainer.json                    TrainerState
    trainer/optimizer.safetensors   exp_avg.NAME, exp_avg_sq.NAME, float32; in a subdirectory, because engines read
                                    every *.safetensors of a model's directory as weights

A checkpoint is written under a temporary name, synced and renamed, so a directory called step-N is complete. It holds
whole tensors and can be resumed on any number of ranks. Only rank 0 of the highest incarnation writes.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import blake3
import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rljob.protocol.checkpoint_files import (
    DIRECTORY,
    OPTIMIZER_FILE,
    STATE_FILE,
    WEIGHTS_FILE,
    complete_checkpoints,
    directory_name,
    is_complete,
)
from rljob.trainer.errors import ModelError, NoRoomError, SupersededError

log = logging.getLogger(__name__)

NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
REMOVED = "tmp-removed"
_LEFTOVER = re.compile(r"step-\d{6,}\.(tmp|old)-.+")


class TrainerState(msgspec.Struct):
    """Content of trainer.json."""

    step: int  # training steps applied: the policy version
    updates: int  # optimizer updates: steps × minibatches
    incarnation: int  # of the trainer that wrote it
    digest: str  # blake3 hex of all tensors, weights first, by name
    versions: dict[str, str]


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

    def newest(self) -> tuple[Path, TrainerState] | None:
        """Return the newest complete checkpoint, or None."""
        known = complete_checkpoints(self.directory)
        if not known:
            return None
        newest = known[max(known)]
        return newest, read_state(newest)

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

    def claim(self, incarnation: int) -> None:
        """Reject all lower incarnations from now on.

        Raises:
            SupersededError: a higher incarnation has claimed the checkpoints.
            NoRoomError: the disk is full.
        """
        with self._needing_room("the file of the trainer's incarnation"):
            self.directory.mkdir(parents=True, exist_ok=True)
            with self._exclusive(incarnation):
                # Written apart and renamed: a full disk must not truncate the existing file.
                new = self.directory / "incarnation.new"
                new.write_text(str(incarnation))
                new.rename(self.directory / "incarnation")

    @contextmanager
    def _exclusive(self, incarnation: int) -> Iterator[None]:
        with (self.directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            file = self.directory / "incarnation"
            highest = int(file.read_text() or 0) if file.exists() else 0
            if incarnation < highest:
                raise SupersededError(f"incarnation {highest} has taken over the checkpoints from {incarnation}")
            yield

    def write(
        self,
        state: TrainerState,
        configuration: dict[str, bytes],
        weights: dict[str, Tensor],
        moments: dict[str, Tensor],
    ) -> None:
        """Write the checkpoint of ``state.step``, durable on return; an existing one with the same content is kept.

        Args:
            state: its ``digest`` is set here.
            configuration: see :func:`read_configuration`.
            weights: whole float32 tensors on the CPU by Hugging Face name.
            moments: whole float32 tensors by the backend's names, for example ``exp_avg.NAME``.

        Raises:
            SupersededError: a higher incarnation has taken over.
            NoRoomError: the disk is full; the files of the attempt are removed.
        """
        state.digest = _digest(weights, moments)
        target = self.path(state.step)
        if self.has(state.step) and read_state(target).digest == state.digest:
            log.info("%s has this content already", target.name)
            return
        suffix = f"{state.incarnation}-{secrets.token_hex(4)}"
        temporary = self.directory / f"{target.name}.tmp-{suffix}"
        try:
            with self._needing_room(f"the checkpoint of step {state.step}"):
                (temporary / OPTIMIZER_FILE).parent.mkdir(parents=True)
                for name, content in configuration.items():
                    (temporary / name).write_bytes(content)
                save_file(weights, temporary / WEIGHTS_FILE, metadata={"format": "pt"})
                save_file(moments, temporary / OPTIMIZER_FILE, metadata={"format": "pt"})
                (temporary / STATE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(state)))
                for path in (*temporary.rglob("*"), temporary):
                    _sync(path)
        except NoRoomError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        with self._exclusive(state.incarnation):
            if target.exists():
                target.rename(self.directory / f"{target.name}.old-{suffix}")
            temporary.rename(target)
            _sync(self.directory)
        self._delete(self.directory / f"{target.name}.old-{suffix}")

    @contextmanager
    def _needing_room(self, content: str) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            if _errno(error) not in NO_ROOM:
                raise
            raise NoRoomError(f"{content} does not fit the disk of {self.directory} ({error}); make room") from None

    def remove(self, steps: list[int]) -> None:
        """Delete the checkpoints of ``steps`` that exist, and directories that could not be deleted before."""
        for step in steps:
            if self.path(step).exists():
                removed = self.directory / f"{self.path(step).name}.{REMOVED}-{secrets.token_hex(4)}"
                self.path(step).rename(removed)  # renamed first: a partly deleted directory must never look complete
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
        ModelError: the file cannot be read.
    """
    try:
        return msgspec.json.decode((checkpoint / STATE_FILE).read_bytes(), type=TrainerState)
    except msgspec.MsgspecError as error:
        raise ModelError(f"{checkpoint / STATE_FILE} cannot be read ({error}); remove {checkpoint}") from None


def read_optimizer_tensor(checkpoint: Path, name: str) -> Tensor:
    """Return one tensor of the optimizer of a checkpoint, for example ``exp_avg.model.norm.weight``.

    Raises:
        ModelError: the tensor cannot be read.
    """
    path = checkpoint / OPTIMIZER_FILE
    try:
        with safe_open(path, "pt") as file:
            return file.get_tensor(name)
    except (FileNotFoundError, SafetensorError) as error:
        raise ModelError(f"{path} is missing or damaged ({error})") from None


def read_configuration(source: Path) -> dict[str, bytes]:
    """Return the files of a Hugging Face directory besides weights, by name: configuration, tokenizer."""
    return {
        path.name: path.read_bytes()
        for path in source.iterdir()
        if path.is_file() and path.suffix not in NOT_COPIED and path.name != STATE_FILE and ".index." not in path.name
    }


def _digest(*parts: dict[str, Tensor]) -> str:
    digest = blake3.blake3()
    for part in parts:
        for name in sorted(part):
            digest.update(name.encode())
            digest.update(memoryview(part[name].contiguous().view(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return digest.hexdigest()


def _errno(error: OSError | SafetensorError) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    match = re.search(r"\(os error (\d+)\)", str(error))
    return int(match[1]) if match else None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
