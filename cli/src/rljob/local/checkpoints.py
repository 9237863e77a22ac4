"""Finds a run's checkpoints and exports one as a model directory.

The trainer writes RUN/checkpoints/step-N atomically: a Hugging Face directory that also contains the trainer's state.
The ledger says which of them the run keeps, and has the digests of their records.
"""

from __future__ import annotations

import contextlib
import glob
import secrets
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rljob.ledger.reader import KeptCheckpoint, LedgerReader, NoRunError, kept_checkpoints
from rljob.ledger.store import LEDGER, ledger_directory
from rljob.local.errors import CliError
from rljob.local.run_directory import RunDirectory
from rljob.protocol.checkpoint_copies import CheckpointCopy, CopyError, open_copies
from rljob.protocol.checkpoint_files import is_complete
from rljob.protocol.checkpoint_record import OTHER_RECORD, find_damage, model_files, read_state_file
from rljob.protocol.sync_path import sync_path

if TYPE_CHECKING:
    from rljob.protocol.s3_checkpoints import S3Checkpoints  # imports s3fs, which takes a second


class RunCheckpoint(NamedTuple):
    """A complete checkpoint that the ledger keeps; it is on this machine."""

    step: int
    path: Path
    digest: str  # of its record, in the ledger
    others: list[int]  # steps of the others


def find(directory: RunDirectory, step: int | None) -> RunCheckpoint:
    """Return a checkpoint; ``step`` None: the newest.

    Raises:
        CliError: with exit code 2: there is no such checkpoint, or the ledger cannot be read.
    """
    checkpoints = _kept(directory)
    if not checkpoints:
        raise CliError(f"the run in {directory.path} has no checkpoint yet; wait for spec.checkpoints.everySteps", 2)
    if step is None:
        step = max(checkpoints)
    if step not in checkpoints:
        raise CliError(
            f"there is no checkpoint of step {step}; there are {', '.join(map(str, sorted(checkpoints)))}", 2
        )
    kept = checkpoints[step]
    if not is_complete(directory.path / kept.path):
        fetch_missing(directory, [step])
    return RunCheckpoint(step, directory.path / kept.path, kept.digest, sorted(checkpoints.keys() - {step}))


def fetch_missing(directory: RunDirectory, steps: Collection[int] | None = None) -> None:
    """Download the kept checkpoints that the run directory lacks from ``spec.checkpoints.uri``.

    Args:
        directory: of the run. Nothing is downloaded while it is in use, because the trainer may remove them.
        steps: only these.

    Raises:
        CliError: with exit code 1: a copy cannot be downloaded; with exit code 2: it is damaged.
    """
    known = _ledger_checkpoints(directory)
    copies, found = _copies(directory, known)
    for step, copy in found.items():
        if steps is None or step in steps:
            assert copies is not None, "it has the copy"
            with copy_errors():
                target = directory.path / known[step].path
                target.parent.mkdir(parents=True, exist_ok=True)
                if damage := copies.download(copy, target.parent):
                    raise damaged(damage, sorted(known.keys() - {step}))


def _copies(
    directory: RunDirectory, known: Mapping[int, KeptCheckpoint]
) -> tuple[S3Checkpoints | None, dict[int, CheckpointCopy]]:
    """Return the copies of a run that is not in use: of kept checkpoints whose directory does not exist."""
    missing = {step: kept for step, kept in known.items() if not (directory.path / kept.path).exists()}
    if not missing or directory.running() or (copies := open_copies(directory.job().spec)) is None:
        return None, {}
    with copy_errors():
        return copies, copies.complete({step: kept.digest for step, kept in missing.items()})


@contextlib.contextmanager
def copy_errors() -> Iterator[None]:
    """Raise the errors of copies as CliError with exit code 1."""
    try:
        yield
    except CopyError as error:
        raise CliError(str(error)) from error


def _kept(directory: RunDirectory) -> dict[int, KeptCheckpoint]:
    """Return step → checkpoint of the ledger, if its directory is complete or can be downloaded."""
    known = _ledger_checkpoints(directory)
    _, found = _copies(directory, known)
    return {step: kept for step, kept in known.items() if step in found or is_complete(directory.path / kept.path)}


def _ledger_checkpoints(directory: RunDirectory) -> dict[int, KeptCheckpoint]:
    """Return step → checkpoint of the ledger."""
    if not (ledger_directory(directory.path) / LEDGER).exists():
        return {}
    try:
        with LedgerReader(directory.path) as ledger:
            kept = kept_checkpoints(ledger)
    except NoRunError as error:
        raise CliError(str(error), 2) from None
    return {known.step: known for known in kept}


def recorded_files(checkpoint: RunCheckpoint) -> dict[str, str]:
    """Return name → digest of the files of a checkpoint's model, from its record.

    Raises:
        CliError: with exit code 2: the record is damaged, or is not the one that the ledger has; with exit code 1: the
            checkpoint was removed meanwhile.
    """
    try:
        state = read_state_file(checkpoint.path)
    except ValueError as error:
        raise _unusable(checkpoint, str(error)) from None
    if state.digest != checkpoint.digest:
        raise _unusable(checkpoint, f"{checkpoint.path}/{OTHER_RECORD}")
    return model_files(state)


def export(checkpoint: RunCheckpoint, destination: Path) -> None:
    """Copy the model of a checkpoint to ``destination``, which is complete once it exists.

    Raises:
        CliError: with exit code 2: the destination is not empty or cannot be written, or the checkpoint is damaged;
            with exit code 1: the checkpoint was removed meanwhile.
    """
    with new_directory(destination) as partial:
        model = recorded_files(checkpoint)
        try:
            for name in model:
                source = checkpoint.path / name
                if not stat.S_ISREG(source.stat().st_mode):  # a device might never end
                    raise _unusable(checkpoint, f"{source} is not a regular file")
                shutil.copyfile(source, partial / name)
                sync_path(partial / name)
        except FileNotFoundError as error:
            raise _unusable(checkpoint, f"{error.filename} is missing") from None
        check_files(partial, model, f"{checkpoint.path}/", checkpoint.others)


def check_destination(destination: Path) -> None:
    """Check that ``destination`` does not exist or is empty.

    Raises:
        CliError: with exit code 2: the destination is a file or a symbolic link, is not empty, or cannot be read.
    """
    try:
        if destination.is_symlink():  # no directory can be renamed to it
            problem = "is a symbolic link"
        elif not destination.exists():
            return
        elif not destination.is_dir():
            problem = "is a file"
        elif any(destination.iterdir()):
            problem = "is not empty"
        else:
            return
    except OSError as error:
        raise _not_created(destination, error) from None
    raise CliError(f"{destination} {problem}; give a directory that does not exist yet", 2)


@contextlib.contextmanager
def new_directory(destination: Path) -> Iterator[Path]:
    """Yield a directory to fill. It is renamed to ``destination`` on success, and removed on an exception.

    Raises:
        CliError: with exit code 2: the destination is not empty or cannot be written.
    """
    check_destination(destination)
    path = destination.absolute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for leftover in path.parent.glob(f".{glob.escape(path.name)}.partial-*"):
            shutil.rmtree(leftover)  # of an export that was killed
        partial = path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
        partial.mkdir()
    except OSError as error:
        raise _not_created(destination, error) from None
    try:
        yield partial
        sync_path(partial)
        try:
            partial.replace(path)
        except OSError as error:  # another program has created it meanwhile
            raise _not_created(destination, error) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _not_created(destination: Path, error: OSError) -> CliError:
    return CliError(f"{destination} cannot be created: {error.strerror}; give another directory", 2)


def check_files(directory: Path, files: Mapping[str, str], what: str, others: Sequence[int] = ()) -> None:
    """Check that the files of a copied model are as the trainer wrote them.

    Args:
        directory: the copy.
        files: name → digest.
        what: beginning of the error, before the name of a file.
        others: steps of other checkpoints, for the error.

    Raises:
        CliError: with exit code 2: a file is damaged.
    """
    if problem := find_damage(directory, files):
        raise damaged(f"{what}{problem}", others)


def damaged(problem: str, others: Sequence[int]) -> CliError:
    """Return the error of a damaged checkpoint; ``others``: steps of the other checkpoints."""
    remedy = f"give another --step: {', '.join(map(str, others))}" if others else "there is no other checkpoint"
    return CliError(f"{problem}; {remedy}", 2)


def _unusable(checkpoint: RunCheckpoint, problem: str) -> CliError:
    """Return the error of a checkpoint with a problem, which may be that the trainer removes it."""
    if checkpoint.path.is_dir():
        return damaged(problem, checkpoint.others)
    return CliError(f"{checkpoint.path} was removed meanwhile, because newer checkpoints were written; use one of them")
