"""Temporary directories of servers (TMPDIR), removed with the server, or when the next server is started.

The shared memory of a server is listed in its directory, and removed with it: files that are younger than the directory
and that processes of the server have mapped. The owner of a directory holds a lock on it until its process ends. A
directory whose lock is free has no owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path

from rljob.rollout import server_shared_memory

log = logging.getLogger(__name__)

PREFIX = "rljob-engine-"
LOCK, SHARED_MEMORY = "lock", "shared-memory"
YOUNG_SECONDS = 60.0
"""A younger directory may not be locked yet."""


class ServerTempDir:
    """The temporary directory of one server of this process."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = (self.path / LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._earlier = server_shared_memory.names()
        self._noted: set[str] = set()
        self._group: int | None = None

    async def note_shared_memory(self, group: int) -> None:
        """Add the files that processes of the server's process group have mapped to the list."""
        self._group = group
        used = await asyncio.to_thread(server_shared_memory.used_by, group)  # a server on GPUs has long lists
        if new := used - self._earlier - self._noted:
            self._noted |= new
            with contextlib.suppress(OSError), (self.path / SHARED_MEMORY).open("a") as file:  # the disk may be full
                file.writelines(f"{name}\n" for name in sorted(new))

    def remove(self) -> None:
        """Delete the directory and its content, and the shared memory; the server has ended. If another process still
        has a part of it mapped, the directory stays until a later start."""
        if not server_shared_memory.remove(self._noted, self._group):
            shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def remove_orphans() -> None:
    """Delete directories whose owners were killed. One whose server has not quite ended stays until a later start."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        try:
            if time.time() - path.stat().st_mtime < YOUNG_SECONDS or path.parent.stat().st_uid != os.getuid():
                continue
            with path.open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if server_shared_memory.remove(_listed(path.parent / SHARED_MEMORY)):
                    continue
                shutil.rmtree(path.parent, ignore_errors=True)
        except OSError:  # in use, another user's, or just removed
            continue
        log.info("removed %s, left by an agent that was killed", os.fspath(path.parent))


def _listed(path: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError, UnicodeDecodeError):
        return path.read_text().splitlines()
    return []
