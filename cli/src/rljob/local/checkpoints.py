"""Lists a run's checkpoints and exports one as a model directory.

The trainer writes RUN/checkpoints/step-N atomically: a Hugging Face directory that also contains the trainer's state.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from rljob.local.errors import CliError
from rljob.local.run_directory import RunDirectory
from rljob.protocol.checkpoint_files import (
    CONFIGURATION_FILE,
    DIRECTORY,
    STATE_FILE,
    WEIGHTS_FILE,
    WEIGHTS_PATTERN,
    complete_checkpoints,
    damage,
)


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
    if checkpoint.is_dir():
        check_checkpoint(checkpoint, "the checkpoint", _others(checkpoint))
    with new_directory(destination) as partial:
        try:
            for source in sorted(checkpoint.iterdir()):
                if source.is_file() and source.name != STATE_FILE:
                    shutil.copyfile(source, partial / source.name)
                    sync(partial / source.name)
        except FileNotFoundError:
            raise CliError(
                f"{checkpoint} was removed meanwhile, because newer checkpoints were written; export one of them"
            ) from None


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


def check_checkpoint(checkpoint: Path, what: str, others: Sequence[int] = ()) -> None:
    """Check that a directory holds a complete model in the format of the trainer.

    Args:
        checkpoint: the directory.
        what: description of the directory, for the error.
        others: steps of other checkpoints, for the error.

    Raises:
        CliError: with exit code 2: the model is damaged.
    """
    for path, problem in _damaged_files(checkpoint):
        remedy = f"; give another --step: {', '.join(map(str, others))}" if others else "; there is no other checkpoint"
        raise CliError(f"{path} {problem}, {what} is damaged{remedy}", 2)


def _others(checkpoint: Path) -> list[int]:
    return sorted(step for step, known in complete_checkpoints(checkpoint.parent).items() if known != checkpoint)


def _damaged_files(checkpoint: Path) -> Iterator[tuple[Path, str]]:
    """Yield path and damage of each damaged file of a checkpoint."""
    try:
        json.loads((checkpoint / CONFIGURATION_FILE).read_bytes())
    except FileNotFoundError:
        yield checkpoint / CONFIGURATION_FILE, "does not exist"
    except ValueError:
        yield checkpoint / CONFIGURATION_FILE, "is not JSON"
    weights = sorted(checkpoint.glob(WEIGHTS_PATTERN))
    if not weights:
        yield checkpoint / WEIGHTS_FILE, "does not exist"
    for path in weights:
        if problem := damage(path):
            yield path, problem


def sync(path: Path) -> None:
    """Flush a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
