"""Why a running run makes no progress, as far as this machine shows: a full disk, or a coordinator that is silent."""

from __future__ import annotations

import shutil
from pathlib import Path

MIN_FREE_BYTES = 1 << 20
"""With less free space the disk counts as full."""
SILENCE_SECONDS = 2.0
"""A coordinator that is restarted answers again after about this time."""


def is_full(directory: Path) -> bool:
    """Return whether the disk of ``directory`` is full. A file system without a size is never full."""
    usage = shutil.disk_usage(directory)
    return usage.total > 0 and usage.free < MIN_FREE_BYTES


def full_disk_message(directory: Path | str) -> str:
    """Return the message on a full disk."""
    return f"the disk of {directory} is full: make room there"


def outage(directory: Path, silent: bool) -> str:
    """Return why the run in ``directory`` makes no progress; empty if no reason is visible.

    Args:
        directory: the run directory.
        silent: whether the coordinator does not answer.
    """
    if is_full(directory):
        return full_disk_message(directory)
    return "the coordinator does not answer" if silent else ""


def age_note(seconds: float) -> str:
    """Return a note on a status that is ``seconds`` old."""
    return f"the coordinator does not answer; its last status is {seconds:.0f} s old"
