"""What each step was like: for the screen, the plot and the metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rljob.protocol.status import HistoryPoint
from rljob.scheduling.groups import Group

ACTIVITIES = ("generating", "training", "updating_weights", "trainer_waiting")


class Stopwatches:
    """How long each activity has been going on since this process began. Activities overlap."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._total = dict.fromkeys(ACTIVITIES, 0.0)

    def set(self, activity: str, on: bool) -> None:
        """Say whether ``activity`` goes on now."""
        began = self._since.get(activity)
        if on and began is None:
            self._since[activity] = time.monotonic()
        elif not on and began is not None:
            self._total[activity] += time.monotonic() - self._since.pop(activity)

    def seconds(self) -> dict[str, float]:
        """Return seconds_ACTIVITY of each."""
        at = time.monotonic()
        return {f"seconds_{name}": total + at - self._since.get(name, at) for name, total in self._total.items()}


class History:
    """Points of the steps applied, and figures of the last one."""

    def __init__(self) -> None:
        self.watches = Stopwatches()
        self.points: list[HistoryPoint] = []
        self.metrics: dict[str, float] = {}
        self.seconds_before = 0.0  # of earlier coordinator processes
        self._began = time.monotonic()
        self._first_step: tuple[int, float] | None = None
        self._mark = (self._began, 0)

    @property
    def seconds(self) -> float:
        """Wall clock the run has been up, over all coordinator starts."""
        return self.seconds_before + time.monotonic() - self._began

    def eta(self, step: int, steps: int) -> float:
        """Return seconds left by the pace since this process' first step; -1 when unknown."""
        if self._first_step is None or step <= self._first_step[0]:
            return -1.0
        first, since = self._first_step
        return (steps - step) * (time.monotonic() - since) / (step - first)

    def add(self, step: int, groups: Sequence[Group], metrics: dict[str, float], generated_tokens: int) -> None:
        """Add an applied step. ``generated_tokens`` counts since this process began."""
        samples = [s for group in groups for s in group.samples if s.end is None]
        rewards = [s.reward for s in samples if s.reward is not None]
        ages = [step - s.min_version for s in samples if s.min_version is not None]
        at = time.monotonic()
        before, tokens = self._mark
        self._mark = (at, generated_tokens)
        if self._first_step is None:
            self._first_step = (step + 1, at)
        point = HistoryPoint(
            step=step,
            reward=sum(rewards) / max(1, len(rewards)),
            staleness=sum(ages) / max(1, len(ages)),
            tokens_per_second=(generated_tokens - tokens) / max(1e-9, at - before),
            seconds=self.seconds,
        )
        self.points.append(point)
        self.metrics = {
            **{f"trainer_{name}": value for name, value in metrics.items()},
            "reward_mean": point.reward,
            "staleness_mean": point.staleness,
            "staleness_max": float(max(ages, default=0)),
            "tokens_per_second": point.tokens_per_second,
        }
