"""Lists a run's checkpoints and exports one as a model directory.

The trainer writes RUN/checkpoints/step-N atomically: a Hugging Face directory that also contains the trainer's state.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rljob.local.errors import CliError
from rljob.local.run_directory import RunDirectory
from rljob.protocol.checkpoint_files import DIRECTORY, complete_checkpoints
from rljob.protocol.checkpoint_record import find_damage, read_state_file


def find(directory: RunDirectory, step: int | None) -> tuple[int, Path]:
    """Return step and path of a checkpoint; ``step`` None: the newest.

    Raises:
        CliError: with exit code 2: there is no such checkpoint.
    """
    checkpoints = steps(directory)
    if not checkpoints:
        raise CliError(f"the run in {directory.path} has no checkpoint yet; wait for spec.checkpoints.everySteps", 2)
    if step is None:
        step = max(checkpoints)
    if step not in checkpoints:
        raise CliError(
            f"there is no checkpoint of step {step}; there are {', '.join(map(str, sorted(checkpoints)))}", 2
        )
    return step, checkpoints[step]


def steps(directory: RunDirectory) -> dict[int, Path]:
    """Return step → path of the complete checkpoints."""
    return complete_checkpoints(directory.path / DIRECTORY)


def export(checkpoint: Path, destination: Path) -> None:
    """Copy the model of a checkpoint to ``destination``, which is complete once it exists.

    Raises:
        CliError: with exit code 2: the destination is not empty or cannot be written, or the checkpoint is damaged;
            with exit code 1: the checkpoint was removed meanwhile.
    """
    with new_directory(destination) as partial:
        try:
            recorded = read_state_file(checkpoint).files
            model = {
                name: digest for name, digest in recorded.items() if "/" not in name
            }  # the others are the trainer's
            for name in model:
                shutil.copyfile(checkpoint / name, partial / name)
                sync(partial / name)
        except (FileNotFoundError, ValueError) as error:
            if not checkpoint.is_dir():
                raise CliError(
                    f"{checkpoint} was removed meanwhile, because newer checkpoints were written; export one of them"
                ) from None
            missing = f"{error.filename} is missing" if isinstance(error, FileNotFoundError) else str(error)
            raise _damaged(missing, _others(checkpoint)) from None
        check_files(partial, model, f"{checkpoint}/", _others(checkpoint))


def check_destination(destination: Path) -> None:
    """Check that ``destination`` does not exist or is empty.

    Raises:
        CliError: with exit code 2: the destination is a file, or is not empty.
    """
    destination = destination.absolute()
    if destination.exists() and not destination.is_dir():
        raise CliError(f"{destination} is a file; give a directory that does not exist yet", 2)
    if destination.exists() and any(destination.iterdir()):
        raise CliError(f"{destination} is not empty; give a directory that does not exist yet", 2)


@contextlib.contextmanager
def new_directory(destination: Path) -> Iterator[Path]:
    """Yield a directory to fill. It is renamed to ``destination`` on success, and removed on an exception.

    Raises:
        CliError: with exit code 2: the destination is not empty or cannot be written.
    """
    destination = destination.absolute()
    check_destination(destination)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        for leftover in destination.parent.glob(f".{destination.name}.partial-*"):
            shutil.rmtree(leftover)  # of an export that was killed
        partial = destination.with_name(f".{destination.name}.partial-{secrets.token_hex(4)}")
        partial.mkdir()
    except OSError as error:
        raise CliError(f"{destination} cannot be created: {error.strerror}; give another directory", 2) from None
    try:
        yield partial
        sync(partial)
        partial.replace(destination)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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
        raise _damaged(f"{what}{problem}", others)


def _damaged(problem: str, others: Sequence[int]) -> CliError:
    remedy = f"give another --step: {', '.join(map(str, others))}" if others else "there is no other checkpoint"
    return CliError(f"{problem}; {remedy}", 2)


def _others(checkpoint: Path) -> list[int]:
    return sorted(step for step, known in complete_checkpoints(checkpoint.parent).items() if known != checkpoint)


def sync(path: Path) -> None:
    """Flush a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
