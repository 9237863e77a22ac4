"""A part's sign of life: its event loop touches the file named by RLJOB_HEARTBEAT.

Whoever supervises the part (the local supervisor, in a cluster rljob.protocol.probe) sees by the file's age that a
process is there but does not move: stopped, deadlocked, or busy with something that should not be in its event loop. A
part begins to beat when it serves, not before: how long loading takes is nobody's fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from rljob.protocol.probe import HEARTBEAT

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.3
"""A third of the shortest failurePolicy.hangSeconds, in round figures."""


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
        except OSError as error:  # the part itself is well; whoever reads the file decides
            if not silent:
                log.warning("%s cannot be touched: %s", path, error)
            silent = True
        await asyncio.sleep(BEAT_SECONDS)
