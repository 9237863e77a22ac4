"""An event loop whose time jumps to the next timer: hours of a run take seconds.

The loop has no file descriptors and no threads, so the code that runs on it must use neither. Callbacks run in the
order in which they were scheduled: equal programs make equal runs.
"""

from __future__ import annotations

import asyncio
from asyncio import base_events
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")
TIME_RESOLUTION = 1e-9
"""Seconds. Timers that are closer than this run in one iteration."""


class StandstillError(Exception):
    """No callback and no timer is left, but the program has not ended."""


class VirtualLoop(base_events.BaseEventLoop):
    """asyncio's own event loop; :meth:`select`, which a real loop calls to wait, sets the time of the next timer."""

    _selector: VirtualLoop
    _clock_resolution: float

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._clock_resolution = TIME_RESOLUTION
        self._selector = self

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        """Advance the time by ``timeout``.

        Raises:
            StandstillError: there is no timer.
        """
        if timeout is None:
            raise StandstillError("nothing is left to happen, and the program waits")
        self._now += timeout
        return []

    def _process_events(self, events: list[Any]) -> None:
        """Do nothing: there are no file descriptors."""

    def _write_to_self(self) -> None:
        """Do nothing: the loop never sleeps."""


def run_in_virtual_time(program: Coroutine[Any, Any, Result]) -> Result:
    """Run a program on a new :class:`VirtualLoop` and return its result. Its unfinished tasks are cancelled.

    Raises:
        StandstillError: the program waits for something that cannot happen.
    """
    loop = VirtualLoop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(program)
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        asyncio.set_event_loop(None)
        loop.close()
