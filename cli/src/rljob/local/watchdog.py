"""Detects a component that hangs: its heartbeat stands still, or one of its processes is stopped.

The heartbeat (``rljob.protocol.heartbeat``) shows an event loop that hangs. It does not show a component that
is stopped before its first beat, nor a stopped child of a beating parent (an engine server, a rank of the trainer): the
state of the processes does.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from rljob.local import process_cleanup

LONGEST_PAUSE_SECONDS = 5.0


class HangDetector:
    """Measures for how long a component has not moved. Pure: the caller passes observations and times.

    Args:
        patience: longest time without a move, in seconds.
        now: monotonic time.
    """

    def __init__(self, patience: float, now: float) -> None:
        self._patience = patience
        self._observed = self._moved = now
        self._beat = 0

    def observe(self, now: float, beat: int, stopped: bool) -> bool:
        """Add an observation; return whether the component has not moved for too long.

        Args:
            now: monotonic time.
            beat: time stamp of the last heartbeat; 0 before the first.
            stopped: whether one of its processes is stopped.
        """
        blind = now - self._observed > self._patience / 2  # this process itself did not run: do not count that time
        moved = not stopped and (beat == 0 or beat != self._beat)
        if blind or moved:
            self._moved = now
        self._observed, self._beat = now, beat
        return now - self._moved >= self._patience


async def wait_until_hung(heartbeat: Path, mark: str, patience: float) -> None:
    """Return once the component whose processes have ``mark`` has not moved for ``patience`` seconds."""
    detector = HangDetector(patience, time.monotonic())
    pause = min(patience / 10, LONGEST_PAUSE_SECONDS)
    while not detector.observe(time.monotonic(), _stamp(heartbeat), process_cleanup.any_stopped(mark)):
        await asyncio.sleep(pause)


def reset(heartbeat: Path) -> None:
    """Make the heartbeat file of a component that is about to start, without a beat.

    Raises:
        OSError: the file cannot be made.
    """
    heartbeat.parent.mkdir(exist_ok=True)
    heartbeat.touch()
    os.utime(heartbeat, (0, 0))


def _stamp(heartbeat: Path) -> int:
    try:
        return heartbeat.stat().st_mtime_ns
    except OSError:  # it was removed; the next beat makes it again
        return 0
