"""Signals to processes that asyncio has started."""

from __future__ import annotations

import asyncio
import contextlib
import os


def signal_child(process: asyncio.subprocess.Process, number: int) -> None:
    """Send a signal to ``process`` if it has not ended.

    The methods of ``process`` poll it first. If it has just ended, they take its exit code from the event loop, which
    then reports code 255 (Python before 3.13).
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
