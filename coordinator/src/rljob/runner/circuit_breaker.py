"""A circuit breaker: a server that fails several times in a row gets no request for a while, then one at a time.

closed → after :data:`FAILURES` failures in a row → open for a wait that doubles → one trial → closed, or open again.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from rljob.protocol.backoff import Backoff

FAILURES = 3
FIRST_OPEN_SECONDS, LAST_OPEN_SECONDS = 0.5, 5.0


class CircuitBreaker:
    """The state of one server.

    Args:
        clock: time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures = 0
        self._backoff = Backoff(FIRST_OPEN_SECONDS, LAST_OPEN_SECONDS)
        self._until = 0.0
        self._trial = False

    @property
    def seconds(self) -> float:
        """Time until a request may be sent: 0 now, infinite while the result of a trial is awaited."""
        if self._trial:
            return math.inf
        return max(0.0, self._until - self._clock()) if self._failures >= FAILURES else 0.0

    def send(self) -> bool:
        """Count a request that is sent; return whether it is the trial of an open breaker."""
        self._trial = self._failures >= FAILURES
        return self._trial

    def succeeded(self) -> None:
        """The server answered."""
        self._trial = False
        self._failures = 0
        self._backoff.reset()

    def failed(self) -> None:
        """The server did not answer, or failed on the request."""
        self._trial = False
        self._failures += 1
        if self._failures >= FAILURES:
            self._until = self._clock() + self._backoff.next()

    def end_trial(self) -> None:
        """The trial has ended, perhaps without an outcome; another request may be the next one."""
        self._trial = False
