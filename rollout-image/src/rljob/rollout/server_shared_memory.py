"""Shared memory of a server: files that its processes create below /dev/shm, and leave there when they are killed.

Engines with several workers have hundreds of MB of it. It counts as memory of the pod, or of the machine.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

DIRECTORY = Path("/dev/shm")
PROCESSES = Path("/proc")


def names() -> set[str]:
    """Return the names of the files below /dev/shm."""
    return set(_inodes())


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
    """Return the names of the files directly below /dev/shm that processes of some groups have mapped.

    Files are found by their numbers: the C library creates a semaphore under another name, which maps show for ever.
    """
    files = _inodes()
    if not files:
        return set()
    mapping = _mapping_of(DIRECTORY)
    mapped: set[int] = set()
    for entry in PROCESSES.iterdir():
        try:
            if entry.name.isdecimal() and is_chosen(os.getpgid(int(entry.name))):
                mapped.update(int(inode) for inode in mapping.findall((entry / "maps").read_bytes()))
        except OSError:  # it has just ended, or belongs to another user
            continue
    return {name for name, inode in files.items() if inode in mapped}


def _inodes() -> dict[str, int]:
    """Return the name and inode of each file below /dev/shm."""
    with contextlib.suppress(OSError), os.scandir(DIRECTORY) as entries:
        return {entry.name: entry.inode() for entry in entries}
    return {}


def _mapping_of(directory: Path) -> re.Pattern[bytes]:
    """Return the pattern of a line of /proc/PID/maps for a file in the file system of a directory: its inode."""
    device = directory.stat().st_dev
    return re.compile(rb"^\S+ \S+ \S+ %02x:%02x (\d+)" % (os.major(device), os.minor(device)), re.MULTILINE)
