"""Detects a component that hangs: its heartbeat does not change, or one of its processes is stopped.

The heartbeat (``rljob.protocol.heartbeat``) detects an event loop that hangs. It does not detect a component that is
stopped before its first beat, or a stopped child of a running parent (an engine server, a rank of the trainer): the
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
    """Measures for how long a component makes no progress. Pure: the caller passes observations and times.

    Args:
        patience: longest time without progress, in seconds.
        now: monotonic time.
    """

    def __init__(self, patience: float, now: float) -> None:
        self._patience = patience
        self._observed_at = self._progress_at = now
        self._beat = 0

    def observe(self, now: float, beat: int, stopped: bool) -> bool:
        """Add an observation; return whether the component hangs: no progress for ``patience`` seconds.

        Args:
            now: monotonic time.
            beat: time stamp of the last heartbeat; 0 before the first.
            stopped: whether one of its processes is stopped.
        """
        paused = now - self._observed_at > self._patience / 2  # this process itself did not run: do not count that time
        progress = not stopped and (beat == 0 or beat != self._beat)
        if paused or progress:
            self._progress_at = now
        self._observed_at, self._beat = now, beat
        return now - self._progress_at >= self._patience


async def wait_until_hung(heartbeat: Path, mark: str, patience: float) -> None:
    """Return when the component whose processes have ``mark`` has made no progress for ``patience`` seconds."""
    detector = HangDetector(patience, time.monotonic())
    pause = min(patience / 10, LONGEST_PAUSE_SECONDS)
    while not detector.observe(time.monotonic(), _stamp(heartbeat), process_cleanup.any_stopped(mark)):
        await asyncio.sleep(pause)


def reset(heartbeat: Path) -> None:
    """Create the heartbeat file of a component before its start, without a beat.

    Raises:
        OSError: the file cannot be created.
    """
    heartbeat.parent.mkdir(exist_ok=True)
    heartbeat.touch()
    os.utime(heartbeat, (0, 0))


def _stamp(heartbeat: Path) -> int:
    try:
        return heartbeat.stat().st_mtime_ns
    except OSError:  # it was removed; the next beat creates it again
        return 0
