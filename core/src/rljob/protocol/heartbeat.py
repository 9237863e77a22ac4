"""A process's heartbeat: its event loop touches the file named by RLJOB_HEARTBEAT.

The supervisor (on one machine the local supervisor, in a cluster rljob.protocol.health_probe) reads the age of this
file and detects a process whose event loop does not run: it is stopped, deadlocked, or blocked by work that does not
belong in an event loop. The heartbeat begins when the process starts to serve, because loading may take any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from rljob.protocol.health_probe import HEARTBEAT

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.3
"""About a third of the minimum of failurePolicy.hangSeconds."""


@contextlib.contextmanager
def beating() -> Iterator[None]:
    """Touch the file of RLJOB_HEARTBEAT from the running event loop inside the context. Do nothing if it is not set."""
    path = os.environ.get(HEARTBEAT)
    task = asyncio.get_running_loop().create_task(_beat(Path(path))) if path else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()


async def _beat(path: Path) -> None:
    warned = False
    while True:
        try:
            path.touch()
            warned = False
        except OSError as error:  # the process itself works; the reader of the file decides
            if not warned:
                log.warning("%s cannot be touched: %s", path, error)
            warned = True
        await asyncio.sleep(BEAT_SECONDS)
