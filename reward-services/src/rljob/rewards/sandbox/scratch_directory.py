"""The directory in which a run may make files: how much it holds, and how it is emptied.

Both work on directories that a hostile program has made: deep, unreadable, full of links. Neither follows a link.
"""

from __future__ import annotations

import contextlib
import os
import stat

MAX_FILES = 1024


class ScratchExceededError(Exception):
    """A run has made more than it may."""


def check_use(directory: str, pid: int, max_bytes: int) -> None:
    """Check what a run keeps, including files that it has removed and still has open.

    Args:
        directory: of the run.
        pid: of the run.
        max_bytes: bytes that all files together may have.

    Raises:
        ScratchExceededError: it is more, or there are more than MAX_FILES files, or some of them cannot be counted.
    """
    seen: dict[int, int] = {}
    waiting = [directory]
    try:
        while waiting:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    found = entry.stat(follow_symlinks=False)
                    seen[found.st_ino] = found.st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    if len(seen) > MAX_FILES or sum(seen.values()) > max_bytes:
                        raise ScratchExceededError
    except FileNotFoundError:  # the program has removed it in the meantime
        pass
    except OSError as error:  # unreadable, or a path of more than 4,096 characters
        raise ScratchExceededError from error
    if sum((seen | _open_files(directory, pid)).values()) > max_bytes:
        raise ScratchExceededError


def _open_files(directory: str, pid: int) -> dict[int, int]:
    """Return inode → bytes of the files in the file system of ``directory`` that a process has open."""
    device, files = os.stat(directory).st_dev, {}
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found = os.stat(f"/proc/{pid}/fd/{name}")
                if found.st_dev == device and stat.S_ISREG(found.st_mode):
                    files[found.st_ino] = found.st_blocks * 512
    return files


def empty(directory: str) -> None:
    """Remove everything in ``directory``, however deep: the contents of each subdirectory move up before it is removed.

    Raises:
        OSError: something cannot be removed.
    """
    top = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    moved = 0
    try:
        while names := os.listdir(top):
            for name in names:
                if not stat.S_ISDIR(os.stat(name, dir_fd=top, follow_symlinks=False).st_mode):
                    os.unlink(name, dir_fd=top)
                    continue
                os.chmod(name, 0o700, dir_fd=top)
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
                try:
                    for below in os.listdir(inner):
                        if stat.S_ISDIR(os.stat(below, dir_fd=inner, follow_symlinks=False).st_mode):
                            os.chmod(below, 0o700, dir_fd=inner)  # a directory that moves must be writable
                            moved += 1
                            os.rename(below, f"{moved}.{os.urandom(8).hex()}", src_dir_fd=inner, dst_dir_fd=top)
                        else:
                            os.unlink(below, dir_fd=inner)
                finally:
                    os.close(inner)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
