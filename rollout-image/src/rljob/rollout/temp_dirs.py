"""Temporary directories of servers (TMPDIR), removed with the server, or when the next server is started.

The owner of a directory holds a lock on it until its process ends. A directory whose lock is free has no owner.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path

log = logging.getLogger(__name__)

PREFIX = "rljob-engine-"
LOCK = "lock"
YOUNG_SECONDS = 60.0
"""A younger directory may not be locked yet."""


class ServerTempDir:
    """The temporary directory of one server of this process."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = (self.path / LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Delete the directory and its content."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def remove_orphans() -> None:
    """Delete directories whose owners were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        try:
            if time.time() - path.stat().st_mtime < YOUNG_SECONDS:
                continue
            with path.open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
        except OSError:  # in use, another user's, or just removed
            continue
        log.info("removed %s, left by an agent that was killed", os.fspath(path.parent))
