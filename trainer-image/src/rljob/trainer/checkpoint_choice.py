"""Chooses the checkpoint to load: the newest one that is as it was written.

Before ranks load a checkpoint, those of each machine compute the digests of its files, each of its share of them: they
read the same files, through one page cache. Other machines check the files again, because they may see others. The
first problem of any rank counts for all ranks. :mod:`rljob.protocol.checkpoint_record` says what that costs.

A refused checkpoint stays where it is: this process has no incarnation yet, and a process that has been replaced must
not move files of its successor. The replay writes the checkpoint again; the coordinator removes one that is not written
again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rljob.protocol.checkpoint_copies import CheckpointCopy
from rljob.protocol.checkpoint_record import TrainerState, find_damage, find_unrecorded, read_state_file
from rljob.protocol.trainer_protocol import RefusedCheckpoint
from rljob.trainer.checkpoint import CheckpointStore
from rljob.trainer.errors import ModelError
from rljob.trainer.process_group import World

if TYPE_CHECKING:
    from rljob.protocol.s3_checkpoints import S3Checkpoints  # imports s3fs, which takes a second

log = logging.getLogger(__name__)

VANISHED = "vanished"
"""Verdict on a checkpoint that the previous trainer process, which may still run, has removed meanwhile."""


@dataclass(frozen=True)
class CheckpointChoice:
    """The checkpoint to load, None for the initial model, and the newer ones that were refused, newest first."""

    path: Path | None
    state: TrainerState | None
    refused: list[RefusedCheckpoint]


def choose_checkpoint(
    checkpoints: CheckpointStore, world: World, copies: S3Checkpoints | None = None
) -> CheckpointChoice:
    """Return the newest checkpoint without damage. All ranks call this together and get the same result.

    Args:
        checkpoints: of the run.
        world: the ranks.
        copies: of the checkpoints. One is downloaded by rank 0 if it is the newest and its checkpoint does not exist.

    Raises:
        ModelError: there are checkpoints, and all are damaged; raised on all ranks.
        CopyError: the copies cannot be listed, or one cannot be downloaded; raised on all ranks.
    """
    copied = world.agree(lambda: copies.complete() if copies is not None and world.rank == 0 else {})[0]
    judged: set[int] = set()
    refused: list[RefusedCheckpoint] = []
    while True:
        # Each rank lists the directory: on NFS that makes it see the names that rank 0 sees.
        local = checkpoints.steps()
        left = [step for step in {*local, *copied} if step not in judged]
        choice = [max(left, default=None), *local]
        newest = world.broadcast(msgspec.json.encode(choice) if world.rank == 0 else None)
        step: int | None
        step, *local = msgspec.json.decode(newest)
        if step is None:
            break
        judged.add(step)
        damage = _download(checkpoints, world, copies, copied[step]) if step not in local else ""
        state, verdict = (None, damage) if damage else _judge(checkpoints.path(step), step, world)
        answers = world.gather((verdict, state.digest if state is not None else ""))
        verdicts = [verdict for verdict, _ in answers]
        if not any(verdicts) and len(set(answers)) > 1:  # the shares are those of different records
            verdicts = [f"{checkpoints.path(step)} is not the same for all ranks"]
        if not any(verdicts):
            return CheckpointChoice(checkpoints.path(step), state, refused)
        if VANISHED not in verdicts:
            reason = next(filter(None, verdicts))
            log.error("the checkpoint of step %d is refused: %s", step, reason)
            refused.append(RefusedCheckpoint(step, reason))
    if refused:
        raise ModelError(
            f"no checkpoint can be used: {_all(refused)}; restore the file from a copy, or start another run"
        )
    return CheckpointChoice(None, None, [])


def _download(checkpoints: CheckpointStore, world: World, copies: S3Checkpoints | None, copy: CheckpointCopy) -> str:
    """Download a copy to its checkpoint's directory on rank 0; return what is wrong with it, on all ranks."""

    def download() -> str:
        if world.rank != 0 or copies is None:
            return ""
        checkpoints.directory.mkdir(parents=True, exist_ok=True)
        return copies.download(copy, checkpoints.directory)

    return world.agree(download)[0]


def _judge(path: Path, step: int, world: World) -> tuple[TrainerState | None, str]:
    """Return the record of a checkpoint and what is wrong with this rank's share of it; empty if nothing is."""
    state, problem = None, ""
    try:
        state = read_state_file(path)
        if state.step != step:
            problem = f"{path} holds the checkpoint of step {state.step}"
        elif damage := find_damage(path, _share(state.files, world)) or find_unrecorded(path, state.files):
            problem = f"{path}/{damage}"
    except ValueError as error:
        problem = str(error)
    return state, VANISHED if problem and not path.is_dir() else problem


def _share(files: Mapping[str, str], world: World) -> dict[str, str]:
    """Return the files whose digests this rank computes. It follows from the names only: all ranks of a machine must
    divide the same files in the same way. Parts of one file have names in a row and nearly the same size."""
    names = sorted(files)[world.local_rank :: world.local_size]
    return {name: files[name] for name in names}


def _all(refused: list[RefusedCheckpoint]) -> str:
    """Return the reason of the newest, and the steps of the others."""
    others = ", ".join(str(other.step) for other in refused[1:])
    return f"{refused[0].reason}{f' (also damaged: step {others})' if others else ''}"
