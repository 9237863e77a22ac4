"""Notices that a part is there but does not move: its heartbeat stands still, or one of its processes is stopped.

The heartbeat (``rljob.protocol.heartbeat``) shows an event loop that hangs. It cannot show a part that is stopped
before its first beat, nor a stopped child beside a beating parent (an engine server, a rank of the trainer): those show
in the processes' state.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from rljob.local import process_cleanup

LONGEST_PAUSE_SECONDS = 5.0


class HangDetector:
    """How long a part has not moved. Pure: told what is seen and when.

    Args:
        patience: seconds without a move that are too long.
        now: monotonic time.
    """

    def __init__(self, patience: float, now: float) -> None:
        self._patience = patience
        self._looked = self._moved = now
        self._beat = 0

    def too_long(self, now: float, beat: int, stopped: bool) -> bool:
        """Look at the part: ``beat`` is the heartbeat's age stamp, 0 before the first; ``stopped``: a process of it
        is. Return whether it has not moved for too long."""
        blind = now - self._looked > self._patience / 2  # it is this process that did not run: forgive
        moved = not stopped and (beat == 0 or beat != self._beat)
        if blind or moved:
            self._moved = now
        self._looked, self._beat = now, beat
        return now - self._moved >= self._patience


async def wait_until_hung(heartbeat: Path, mark: str, patience: float) -> None:
    """Return once the part whose processes carry ``mark`` has not moved for ``patience`` seconds."""
    stillness = HangDetector(patience, time.monotonic())
    pause = min(patience / 10, LONGEST_PAUSE_SECONDS)
    while not stillness.too_long(time.monotonic(), _stamp(heartbeat), process_cleanup.any_stopped(mark)):
        await asyncio.sleep(pause)


def reset(heartbeat: Path) -> None:
    """Make the file of a part that is about to start: it has not beaten yet.

    Raises:
        OSError: it cannot be made.
    """
    heartbeat.parent.mkdir(exist_ok=True)
    heartbeat.touch()
    os.utime(heartbeat, (0, 0))


def _stamp(heartbeat: Path) -> int:
    try:
        return heartbeat.stat().st_mtime_ns
    except OSError:  # somebody removed it; the next beat makes it again
        return 0
