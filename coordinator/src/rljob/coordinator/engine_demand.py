"""How many engines a pool needs, so that training does not wait for samples and engines are not idle.

The measure is the share of time in which the trainer waits for a batch, and the share in which engines have requests.
Both depend on the phase of a step, so they are measured over whole steps: from the start of one to the start of a later
one. A change of the number of engines starts the measurement again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

WAITING_SHARE = 0.2
"""Training waits if the trainer waits for more than this share of the time. A pool that grows until the trainer never
waits would pay a multiple of engines for the last samples of every step."""
BUSY_SHARE = 0.5
"""A pool grows only if its engines have requests for more than this share: otherwise samples wait for something
else."""
FULL_SHARE = 0.85
"""A pool shrinks to so many engines that they have requests for this share of the time."""
LARGEST_FACTOR = 2.0
"""Largest change of the number of engines by one measurement."""
LEAST_SECONDS = 30.0
"""A measurement has as many steps as take this long."""
LONG_SECONDS = 120.0
"""A step that is longer than this, and than twice the measurement before, is measured before it ends."""


def engines_needed(engines: int, waiting: float, busy: float) -> float:
    """Return the number of engines that a pool needs.

    If generation limits a pipeline that needs D engines, ``waiting`` is 1 − engines/D: the pool grows to D. If it has
    more than D, ``busy`` is D/engines: it shrinks to D/FULL_SHARE, where it stays. With α = 0, ``busy`` is
    1 − ``waiting``: the pool grows while generation takes longer than training, and shrinks, by half at most, where it
    takes less than a quarter of it; half the engines then still do not satisfy the first condition.

    Args:
        engines: that the pool has.
        waiting: share of the time in which the trainer waits for a batch.
        busy: share of the time in which an engine has requests, of the time in which it could have some.
    """
    if waiting > WAITING_SHARE:
        if busy <= BUSY_SHARE:
            return float(engines)
        return engines * min(LARGEST_FACTOR, 1 / max(1 - waiting, 1 / LARGEST_FACTOR))
    return min(float(engines), max(engines * busy / FULL_SHARE, engines / LARGEST_FACTOR))


@dataclass(frozen=True)
class Counters:
    """Counters of a pool at one moment. ``version``: batches applied. The others are seconds since any moment: ``at``
    by the clock, ``trainer_waiting``, and of the engines that serve together ``generating`` and ``waiting``."""

    at: float
    version: int
    trainer_waiting: float
    generating: float
    waiting: float


@dataclass
class EngineDemand:
    """Measures one pool. ``needed``: engines that it needs; None: not measured yet."""

    needed: float | None = None
    _engines: int = 0
    _steps: list[Counters] = field(default_factory=list)
    """At the start of each step; the first may have been under way when the measurement began."""
    _whole: bool = False
    """Whether the first of them is the start of a step."""
    _span: float = 0.0

    def update(self, engines: int, now: Counters | None) -> None:
        """Measure.

        Args:
            engines: that serve in the pool.
            now: the counters; None: nothing can be measured, because the run does not train.
        """
        if now is None or not engines or engines != self._engines:
            self._engines, self._whole = engines, False
            self._steps = [] if now is None else [now]
            return
        if not self._steps:
            self._steps = [now]
        if now.version != self._steps[-1].version:
            if not self._whole:
                self._steps, self._whole = [], True
            self._steps.append(now)
            while len(self._steps) > 2 and now.at - self._steps[1].at >= LEAST_SECONDS:
                del self._steps[0]
            if now.at - self._steps[0].at >= LEAST_SECONDS:
                self._measure(self._steps[0], now)
        elif now.at - self._steps[-1].at > max(LONG_SECONDS, 2 * self._span):
            self._measure(self._steps[-1], now)

    def _measure(self, begin: Counters, end: Counters) -> None:
        elapsed = end.at - begin.at
        could = end.generating - begin.generating + end.waiting - begin.waiting
        if could <= 0:
            return  # the engines had no weights all the time
        if end.version != begin.version:
            self._span = elapsed
        waiting = min(1.0, max(0.0, (end.trainer_waiting - begin.trainer_waiting) / elapsed))
        busy = min(1.0, max(0.0, (end.generating - begin.generating) / could))
        self.needed = engines_needed(self._engines, waiting, busy)
