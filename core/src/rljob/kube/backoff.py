"""Back-off between retries of a background task."""

from __future__ import annotations

import asyncio
import random

FIRST_SECONDS = 0.5
LAST_SECONDS = 30.0


class Backoff:
    """Delays that double from FIRST_SECONDS to LAST_SECONDS, each multiplied by a random factor of 0.5 to 1."""

    def __init__(self) -> None:
        self._seconds = FIRST_SECONDS

    def reset(self) -> None:
        """Begin with the first delay again, after a success."""
        self._seconds = FIRST_SECONDS

    async def wait(self) -> None:
        """Sleep for the next delay."""
        seconds, self._seconds = self._seconds, min(2 * self._seconds, LAST_SECONDS)
        await asyncio.sleep(seconds * random.uniform(0.5, 1.0))
