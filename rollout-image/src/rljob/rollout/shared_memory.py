"""Shared memory of a server: files that its processes create below /dev/shm, and leave there when they are killed.

Engines with several workers have hundreds of MB of it. It counts as memory of the pod, or of the machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

DIRECTORY = Path("/dev/shm")
PROCESSES = Path("/proc")


def used_by(group: int) -> set[str]:
    """Return the names of the files below /dev/shm that processes of a process group have mapped."""
    found: set[str] = set()
    for entry in PROCESSES.iterdir():
        try:
            if entry.name.isdecimal() and os.getpgid(int(entry.name)) == group:
                found.update(_mapped((entry / "maps").read_text().splitlines()))
        except (OSError, UnicodeDecodeError):  # it has just ended, or belongs to another user
            continue
    return found


def _mapped(lines: Iterable[str]) -> Iterable[str]:
    """Yield the names of files directly below /dev/shm in a process's maps; those that have no name any more are left
    out."""
    for line in lines:
        path = line.partition("/")[2]
        folder, _, name = f"/{path}".rpartition("/")
        if folder == str(DIRECTORY) and not name.endswith(" (deleted)"):
            yield name


def remove(names: Iterable[str]) -> None:
    """Delete files below /dev/shm, if they exist."""
    for name in names:
        (DIRECTORY / name).unlink(missing_ok=True)
