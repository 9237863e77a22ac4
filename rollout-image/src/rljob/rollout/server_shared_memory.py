"""Shared memory of a server: files that its processes create below /dev/shm, and leave there when they are killed.

Engines with several workers have hundreds of MB of it. It counts as memory of the pod, or of the machine.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

DIRECTORY = Path("/dev/shm")
PROCESSES = Path("/proc")


def names() -> set[str]:
    """Return the names of the files below /dev/shm."""
    with contextlib.suppress(OSError):
        return set(os.listdir(DIRECTORY))
    return set()


def used_by(group: int) -> set[str]:
    """Return the names of the files below /dev/shm that processes of a process group have mapped."""
    return _mapped_by(lambda each: each == group)


def remove(chosen: Iterable[str], group: int | None = None) -> set[str]:
    """Delete files of this user below /dev/shm that no process has mapped. Return the names of those that one has.

    Args:
        chosen: names; those of files elsewhere are left out.
        group: a process group that is being killed: what its processes have mapped is deleted.
    """
    chosen = {name for name in chosen if "/" not in name}
    in_use = _mapped_by(lambda each: each != group) & chosen
    for name in chosen - in_use:
        path = DIRECTORY / name
        with contextlib.suppress(OSError):  # it is gone, or the user may not delete it
            if path.lstat().st_uid == os.getuid():
                path.unlink()
    return in_use


def _mapped_by(is_chosen: Callable[[int], bool]) -> set[str]:
    """Return the names of the files directly below /dev/shm that processes of some groups have mapped; those that have
    no name any more are left out."""
    found: set[str] = set()
    for entry in PROCESSES.iterdir():
        try:
            if entry.name.isdecimal() and is_chosen(os.getpgid(int(entry.name))):
                maps = (entry / "maps").read_text()
                found.update(_names_in(maps.splitlines()) if f"{DIRECTORY}/" in maps else ())
        except (OSError, UnicodeDecodeError):  # it has just ended, or belongs to another user
            continue
    return found


def _names_in(maps: Iterable[str]) -> Iterator[str]:
    for line in maps:
        folder, _, name = f"/{line.partition('/')[2]}".rpartition("/")
        if folder == str(DIRECTORY) and not name.endswith(" (deleted)"):
            yield name
