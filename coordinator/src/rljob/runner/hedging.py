"""Hedged requests (Dean and Barroso, The Tail at Scale, 2013): the slowest requests are sent a second time."""

from __future__ import annotations

import asyncio
import bisect
import math
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")
OBSERVED = 128
LEAST_OBSERVED = 20
SLOWEST = 0.05
"""Share of the requests that may be hedged."""
LEAST_SECONDS = 0.05
FACTOR = 1.5
"""Of the percentile: the usual slow requests leave the share to a replica that hangs."""


class HedgeDelay:
    """The time after which a request is sent again: 1.5 times the 95th percentile of the last ones."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque()
        self._ordered: list[float] = []  # the same, ascending
        self._requests = 0
        self._hedged = 0

    def observe(self, seconds: float) -> None:
        """Record the time of a request that was answered."""
        if len(self._seconds) == OBSERVED:
            del self._ordered[bisect.bisect_left(self._ordered, self._seconds.popleft())]
        self._seconds.append(seconds)
        bisect.insort(self._ordered, seconds)
        self._requests += 1

    @property
    def seconds(self) -> float | None:
        """Time after which to send a request again; None: too few requests were observed."""
        if len(self._seconds) < LEAST_OBSERVED:
            return None
        return max(LEAST_SECONDS, FACTOR * self._ordered[math.ceil((1 - SLOWEST) * len(self._ordered)) - 1])

    def take(self) -> bool:
        """Return whether one more request may be hedged, and count it."""
        if self._hedged + 1 > SLOWEST * self._requests:
            return False
        self._hedged += 1
        return True


async def hedged(
    first: Coroutine[Any, Any, Result],
    again: Callable[[], Coroutine[Any, Any, Result] | None],
    seconds: float | None,
) -> Result:
    """Return the first result of a request and of its repetition; the other one is cancelled.

    Args:
        first: the request.
        again: called after ``seconds`` without an answer; returns the repetition, or None.
        seconds: None: the request is not repeated.

    Raises:
        Exception: that of the first request, if both fail.
    """
    requests = [asyncio.create_task(first)]
    try:
        done, _ = await asyncio.wait(requests, timeout=seconds)
        if not done and (repetition := again()) is not None:
            requests.append(asyncio.create_task(repetition))
        waiting = set(requests)
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for request in done:
                if request.exception() is None:
                    return request.result()
        return requests[0].result()
    finally:
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
