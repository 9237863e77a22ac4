"""A process's heartbeat: its event loop touches the file named by RLJOB_HEARTBEAT.

By the age of that file its supervisor (on one machine the local supervisor, in a cluster rljob.protocol.health_probe)
detects a process whose event loop does not run: stopped, deadlocked, or blocked by work that does not belong in an
event loop. The heartbeat begins when the process serves, not before: loading may take any time.
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
    """While inside, the running event loop touches the file of RLJOB_HEARTBEAT; does nothing when that is not set."""
    path = os.environ.get(HEARTBEAT)
    task = asyncio.get_running_loop().create_task(_beat(Path(path))) if path else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()


async def _beat(path: Path) -> None:
    silent = False
    while True:
        try:
            path.touch()
            silent = False
        except OSError as error:  # the process itself works; the reader of the file decides
            if not silent:
                log.warning("%s cannot be touched: %s", path, error)
            silent = True
        await asyncio.sleep(BEAT_SECONDS)
