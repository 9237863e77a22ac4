"""Fetches a model from a job's coordinator. An interrupted transfer continues at the same byte."""

from __future__ import annotations

import http.client
import time
from pathlib import Path
from typing import BinaryIO

import msgspec

from rljob.local.checkpoints import check_files, damaged, new_directory
from rljob.local.errors import CliError
from rljob.protocol.sync_path import sync_path
from rljob.remote.coordinator_api import CoordinatorApi, CoordinatorUnavailableError
from rljob.remote.job import RemoteJob

CHUNK = 1 << 20
TRIES = 5
"""Consecutive attempts without a received byte."""
PAUSE_SECONDS = 2.0


class CheckpointFiles(msgspec.Struct):
    """A checkpoint: name → bytes, and name → digest, of the files of its model; none if it is damaged."""

    step: int
    files: dict[str, int]
    digests: dict[str, str]
    damage: str = ""


def export(job: RemoteJob, destination: Path, step: int | None) -> int:
    """Copy the model of a checkpoint to ``destination``, which is complete once it exists; return its step.

    Args:
        job: that wrote the checkpoint.
        destination: a directory that does not exist, or is empty.
        step: of the checkpoint; None: the newest.

    Raises:
        CliError: there is no such checkpoint, it was removed or is damaged, the destination cannot be written, or the
            coordinator is not available.
    """
    coordinator = job.coordinator
    listed, _ = coordinator.ask("/v1/checkpoints", list[CheckpointFiles])
    checkpoints = {each.step: each for each in listed}
    if not checkpoints:
        raise CliError(f"{job.name} has no checkpoint yet; wait for spec.checkpoints.everySteps", 2)
    chosen = checkpoints.get(max(checkpoints) if step is None else step)
    if chosen is None:
        raise CliError(
            f"there is no checkpoint of step {step}; there are {', '.join(map(str, sorted(checkpoints)))}", 2
        )
    others, what = sorted(checkpoints.keys() - {chosen.step}), f"the checkpoint of step {chosen.step}: "
    if chosen.damage:
        raise damaged(f"{what}{chosen.damage}", others)
    with new_directory(destination) as partial:
        for name, size in chosen.files.items():
            path = partial / name
            if path.parent != partial:
                raise CliError(f"the coordinator lists a file {name!r}, which is not a file of a model", 1)
            with path.open("wb") as file:
                _fetch(coordinator, chosen.step, name, size, file)
            sync_path(path)
        check_files(partial, chosen.digests, what, others)
    return chosen.step


def _fetch(coordinator: CoordinatorApi, step: int, name: str, size: int, file: BinaryIO) -> None:
    """Fetch ``size`` bytes of a file into ``file``."""
    tries = 0
    while (done := file.tell()) < size:
        try:
            with coordinator.open(f"/v1/checkpoints/{step}/{name}", offset=done) as answer:
                while chunk := answer.read(CHUNK):
                    file.write(chunk)
        except (CoordinatorUnavailableError, http.client.HTTPException):
            if file.tell() == done and tries >= TRIES:
                raise
        except CliError as error:
            raise CliError(f"{name}: {error.sentence}; export another checkpoint") from None
        tries = 0 if file.tell() > done else tries + 1
        if tries > TRIES:
            raise CliError(f"the transfer of {name} ended repeatedly at byte {file.tell()} of {size}; try again later")
        if file.tell() < size:
            time.sleep(PAUSE_SECONDS)
