"""Work queue of the jobs to reconcile.

:class:`Schedule` is the logic without clock or tasks; :class:`WorkQueue` adds a clock and waiting workers. A key that
is added several times is queued once. Two workers never process the same key. A key that is added while it is processed
is processed again.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")

FIRST_BACKOFF_SECONDS = 0.1
LAST_BACKOFF_SECONDS = 60.0


class Schedule(Generic[K]):
    """Keys that wait, keys that are due later, and keys in processing. Times are seconds of any clock."""

    def __init__(self) -> None:
        self._waiting: dict[K, float] = {}
        """Key → time of the first add, in the order of processing."""
        self._working: set[K] = set()
        self._again: dict[K, float] = {}
        """Keys that were added during their processing → time of the first add."""
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        """Heap of _due; an entry that differs from _due is ignored."""
        self._count = 0
        self._failures: dict[K, int] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._again)

    def add(self, key: K, now: float) -> None:
        """Queue ``key``."""
        if key in self._working:
            self._again.setdefault(key, now)
        else:
            self._waiting.setdefault(key, now)

    def add_after(self, key: K, seconds: float, now: float) -> None:
        """Queue ``key`` after ``seconds``, unless it is due earlier already."""
        if seconds <= 0:
            self.add(key, now)
        elif now + seconds < self._due.get(key, float("inf")):
            self._due[key] = now + seconds
            self._count += 1
            heapq.heappush(self._heap, (now + seconds, self._count, key))

    def failed(self, key: K, now: float, at_least: float = 0.0) -> float:
        """Queue ``key`` after its back-off, which doubles with every failure; return the back-off in seconds."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        back_off = float(min(FIRST_BACKOFF_SECONDS * 2 ** min(failures - 1, 20), LAST_BACKOFF_SECONDS))
        seconds = max(back_off, min(at_least, LAST_BACKOFF_SECONDS))
        self.add_after(key, seconds, now)
        return seconds

    def succeeded(self, key: K) -> None:
        """Forget the failures of ``key``."""
        self._failures.pop(key, None)

    def take(self, now: float) -> tuple[K, float] | None:
        """Return the next key and the seconds it has waited; None if no key is due.

        A later due time of this key is dropped: the worker sets a new one.
        """
        while self._heap and self._heap[0][0] <= now:
            due, _, key = heapq.heappop(self._heap)
            if self._due.get(key) == due:
                del self._due[key]
                self.add(key, due)
        if not self._waiting:
            return None
        key = next(iter(self._waiting))
        since = self._waiting.pop(key)
        self._due.pop(key, None)
        self._working.add(key)
        return key, max(0.0, now - since)

    def done(self, key: K) -> None:
        """End the processing of ``key``."""
        self._working.discard(key)
        since = self._again.pop(key, None)
        if since is not None:
            self._waiting[key] = since

    def next_due(self) -> float | None:
        """Return the time at which the next delayed key is due; None if there is none."""
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None


class ClosedError(Exception):
    """The queue was closed."""


class WorkQueue(Generic[K]):
    """A schedule for workers of one event loop. ``clock``: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._schedule: Schedule[K] = Schedule()
        self._clock = clock
        self._waiters: list[asyncio.Future[None]] = []
        self._closed = False

    def __len__(self) -> int:
        return len(self._schedule)

    def add(self, key: K) -> None:
        """Queue ``key``."""
        self._schedule.add(key, self._clock())
        self._wake_one()

    def add_after(self, key: K, seconds: float) -> None:
        """Queue ``key`` after ``seconds``, unless it is due earlier already."""
        self._schedule.add_after(key, seconds, self._clock())
        self._wake_one()

    def failed(self, key: K, at_least: float = 0.0) -> float:
        """Queue ``key`` after its back-off; return the back-off in seconds."""
        seconds = self._schedule.failed(key, self._clock(), at_least)
        self._wake_one()
        return seconds

    def succeeded(self, key: K) -> None:
        """Forget the failures of ``key``."""
        self._schedule.succeeded(key)

    async def get(self) -> tuple[K, float]:
        """Wait for the next key; return it and the seconds it has waited. The caller calls :meth:`done` afterwards.

        Raises:
            ClosedError: the queue was closed.
        """
        while self._closed or (taken := self._schedule.take(self._clock())) is None:
            if self._closed:
                raise ClosedError
            due = self._schedule.next_due()
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await asyncio.wait([waiter], timeout=None if due is None else max(0.0, due - self._clock()))
            except asyncio.CancelledError:
                self._wake_one()  # pass the wake-up on to another worker
                raise
            finally:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
        if len(self) or self._schedule.next_due() is not None:
            self._wake_one()  # waiting workers do not know newer due times
        return taken

    def done(self, key: K) -> None:
        """End the processing of ``key``."""
        self._schedule.done(key)
        self._wake_one()

    def close(self) -> None:
        """Make every current and later :meth:`get` raise ClosedError."""
        self._closed = True
        while self._waiters:
            self._wake_one()

    def _wake_one(self) -> None:
        if self._waiters:
            waiter = self._waiters.pop(0)
            if not waiter.done():
                waiter.set_result(None)
