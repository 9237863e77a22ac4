"""The temporary directory of a cluster: removed when the cluster stops, or by the next cluster if it was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "rljob-cluster-"
_YOUNG_SECONDS = 60.0


@contextlib.contextmanager
def directory() -> Iterator[Path]:
    """Yield a new directory that is locked while the context is open."""
    parent = Path(tempfile.gettempdir())
    remove_unused(parent)
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    handle = os.open(path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield path
    finally:
        os.close(handle)
        shutil.rmtree(path, ignore_errors=True)


def remove_unused(parent: Path, young_seconds: float = _YOUNG_SECONDS) -> None:
    """Remove the directories in ``parent`` of clusters whose program was killed: no process holds their lock."""
    for path in parent.glob(f"{PREFIX}*"):
        try:
            if time.time() - path.stat().st_mtime < young_seconds:
                continue  # may be new and not locked yet
            handle = os.open(path, os.O_RDONLY)
        except OSError:
            continue  # its owner removes it, or another user owns it
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(handle)
