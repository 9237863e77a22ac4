"""Exponential backoff between attempts."""

from __future__ import annotations

import asyncio
import random

FIRST_SECONDS, LAST_SECONDS = 0.5, 30.0


class Backoff:
    """Waits that double from ``first`` to ``last`` seconds.

    A random factor of 0.5 to 1 shortens each wait, so that clients that failed together do not retry together.
    """

    def __init__(self, first: float = FIRST_SECONDS, last: float = LAST_SECONDS) -> None:
        self._first = first
        self._last = last
        self._seconds = first

    def next(self) -> float:
        """Return the seconds to wait now; the next wait is longer."""
        seconds = self._seconds * random.uniform(0.5, 1.0)
        self._seconds = min(2 * self._seconds, self._last)
        return seconds

    def reset(self) -> None:
        """Restart the waits at ``first``. Call it after a success."""
        self._seconds = self._first

    async def wait(self) -> None:
        """Sleep for :meth:`next` seconds."""
        await asyncio.sleep(self.next())
