"""An event loop whose time jumps to the next timer: hours of a run take seconds.

The loop has no file descriptors and no threads, so the code that runs on it must use neither. Callbacks run in the
order in which they were scheduled, timers of one time too: equal programs make equal runs.
"""

from __future__ import annotations

import asyncio
import heapq
from asyncio import base_events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

Result = TypeVar("Result")
Ts = TypeVarTuple("Ts")
TIME_RESOLUTION = 1e-9
"""Seconds. Timers that are closer than this run in one iteration."""
MOST_CANCELLED = 1024
"""Cancelled timers that are kept until half of all timers are cancelled."""


class StandstillError(Exception):
    """No callback and no timer is left, but the program has not ended."""


class _Callback(asyncio.Handle):
    """asyncio's own handle, made in less time: a run makes several for each message."""

    __slots__ = ()

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], loop: VirtualLoop, context: Context | None
    ) -> None:
        self._callback = callback
        self._args = args
        self._loop = loop
        self._context = context
        self._cancelled = False
        self._repr = self._source_traceback = None


class _Timer(asyncio.TimerHandle):
    """The same with a time."""

    __slots__ = ()

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: VirtualLoop,
        context: Context | None,
    ) -> None:
        self._when = when
        self._callback = callback
        self._args = args
        self._loop = loop
        self._context = context
        self._cancelled = False
        self._scheduled = True
        self._repr = self._source_traceback = None


class VirtualLoop(base_events.BaseEventLoop):
    """asyncio's own event loop, which sets the time of the next timer where a real loop waits.

    A callback that is not a task's, and for which no context is given, runs in the context of the loop.
    """

    _ready: deque[Any]  # of handles
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._timers: list[tuple[float, int, _Timer]] = []  # heap of (time, order, timer)
        self._timers_made = 0
        self._timers_cancelled = 0  # at most so many of the heap

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Call ``callback`` in the next iteration."""
        handle = _Callback(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call ``callback`` after ``delay`` seconds."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call ``callback`` at a virtual time."""
        timer = _Timer(when, callback, args, self, context)
        self._timers_made += 1
        heapq.heappush(self._timers, (when, self._timers_made, timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Drop the cancelled timers if they are many."""
        if not handle._scheduled:  # type: ignore[attr-defined]  # it has run
            return
        self._timers_cancelled += 1
        if self._timers_cancelled > max(MOST_CANCELLED, len(self._timers) // 2):
            self._timers[:] = [entry for entry in self._timers if not entry[2]._cancelled]
            heapq.heapify(self._timers)
            self._timers_cancelled = 0

    def _run_once(self) -> None:
        """Run the callbacks that are ready, and the timers that are due, until the loop is stopped. If there are none,
        advance the time.

        Raises:
            StandstillError: there is no timer.
        """
        ready, timers = self._ready, self._timers
        next_ready, next_timer = ready.popleft, heapq.heappop
        while True:
            due = self._now + TIME_RESOLUTION
            while timers and (timers[0][0] < due or timers[0][2]._cancelled):
                timer = next_timer(timers)[2]
                timer._scheduled = False
                if timer._cancelled:
                    self._timers_cancelled -= 1
                else:
                    ready.append(timer)
            if not ready and not self._stopping:
                if not timers:
                    raise StandstillError("nothing is left to happen, and the program waits")
                self._now = timers[0][0]
            for _ in range(len(ready)):
                handle = next_ready()
                if handle._cancelled:
                    continue
                try:
                    if handle._context is None:
                        handle._callback(*handle._args)
                    else:
                        handle._context.run(handle._callback, *handle._args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001 (as in asyncio: it is logged, and the loop continues)
                    what = f"{handle._callback} raised"
                    self.call_exception_handler({"message": what, "exception": error, "handle": handle})
            if self._stopping:
                return

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
