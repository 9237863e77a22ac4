"""Fetches a model from a job's coordinator, or from the copies of its checkpoints in S3. An interrupted transfer from
the coordinator continues at the same byte."""

from __future__ import annotations

import http.client
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from rljob.local.checkpoints import RunCheckpoint, check_files, copy_errors, damaged, new_directory
from rljob.local.checkpoints import export as export_local
from rljob.local.errors import CliError
from rljob.protocol.checkpoint_copies import CheckpointCopy, open_address
from rljob.protocol.checkpoint_files import directory_name
from rljob.protocol.checkpoint_record import read_state_file
from rljob.protocol.sync_path import sync_path
from rljob.remote.coordinator_api import CoordinatorApi, CoordinatorUnavailableError
from rljob.remote.job import RemoteJob

if TYPE_CHECKING:
    from rljob.protocol.s3_checkpoints import S3Checkpoints  # imports s3fs, which takes a second

ADDRESS = (("checkpoints", "uri"), ("downloads", "s3Endpoint"))  # in the RLJob's spec
CHUNK = 1 << 20
TRIES = 5
"""Consecutive attempts without a received byte."""
PAUSE_SECONDS = 2.0


class CheckpointFiles(msgspec.Struct):
    """A checkpoint: name → bytes, and name → digest, of the files of its model; none if it is damaged, or is not in the
    job's storage. Then ``record`` is the digest of its record."""

    step: int
    files: dict[str, int]
    digests: dict[str, str]
    damage: str = ""
    record: str = ""


def export(job: RemoteJob, destination: Path, step: int | None) -> int:
    """Copy the model of a checkpoint to ``destination``, which is complete once it exists; return its step.

    A checkpoint that the storage lacks, or whose coordinator has gone, is read from ``spec.checkpoints.uri``, with the
    credentials of this process.

    Args:
        job: that wrote the checkpoint.
        destination: a directory that does not exist, or is empty.
        step: of the checkpoint; None: the newest.

    Raises:
        CliError: there is no such checkpoint, it was removed or is damaged, the destination cannot be written, or the
            coordinator or S3 is not available.
    """
    copies, stored, records = _open_copies(job), dict[int, CheckpointFiles](), None
    try:
        listed, _ = job.coordinator.ask("/v1/checkpoints", list[CheckpointFiles])
        stored = {each.step: each for each in listed if not each.record}
        records = {each.step: each.record for each in listed if each.record}
    except CoordinatorUnavailableError:
        if copies is None:
            raise
    wanted = max({*stored, *(records or {})}, default=None) if step is None else step
    copied = {} if copies is None or wanted in stored else _copied(copies, records)
    steps = sorted({*stored, *copied})
    if not steps:
        raise CliError(f"{job.name} has no checkpoint yet; wait for spec.checkpoints.everySteps", 2)
    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        raise CliError(f"there is no checkpoint of step {chosen}; there are {', '.join(map(str, steps))}", 2)
    others = [each for each in steps if each != chosen]
    if chosen in stored:
        _export_stored(job.coordinator, stored[chosen], others, destination)
    else:
        assert copies is not None, "it has the copy"
        _export_copy(copies, copied[chosen], (records or {}).get(chosen), others, destination)
    return chosen


def _open_copies(job: RemoteJob) -> S3Checkpoints | None:
    spec = job.body["spec"]
    uri, endpoint = ((spec.get(part) or {}).get(name) for part, name in ADDRESS)
    return None if uri is None else open_address(uri, endpoint)


def _copied(copies: S3Checkpoints, records: Mapping[int, str] | None) -> dict[int, CheckpointCopy]:
    """Return step → complete copy; with ``records`` only of checkpoints whose record has such a digest."""
    with copy_errors():
        return copies.complete(records)


def _export_copy(
    copies: S3Checkpoints, copy: CheckpointCopy, record: str | None, others: list[int], destination: Path
) -> None:
    """Export a copy. ``record``: digest that its record must have; None: it is not known."""
    parent = destination.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=f".{destination.name}.copy-", dir=parent)
    except OSError as error:
        raise CliError(f"{destination} cannot be created: {error.strerror}; give another directory", 2) from None
    with folder as place:
        with copy_errors():
            damage = copies.download(copy, Path(place))
        if damage:
            raise damaged(damage, others)
        path = Path(place) / directory_name(copy.step)
        digest = read_state_file(path).digest if record is None else record
        export_local(RunCheckpoint(copy.step, path, digest, others), destination)


def _export_stored(coordinator: CoordinatorApi, chosen: CheckpointFiles, others: list[int], destination: Path) -> None:
    """Export a checkpoint of the job's storage."""
    what = f"the checkpoint of step {chosen.step}: "
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
