"""What each step was like: for the screen, the plot and the metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rljob.protocol.status import HistoryPoint
from rljob.scheduling.groups import Group

ACTIVITIES = ("generating", "training", "updating_weights", "trainer_waiting")


SMOOTHED_STEPS = 8
"""Of the speed that is shown: engines work ahead, so a step's own tokens may be none."""


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


class RunProgress:
    """The clock of a run, points of the steps applied, and the metrics of the last one."""

    def __init__(self) -> None:
        self.watches = Stopwatches()
        self.points: list[HistoryPoint] = []
        self.metrics: dict[str, float] = {}
        self.seconds_before = 0.0  # of earlier coordinator processes
        self._began = time.monotonic()
        self._ended: float | None = None
        self._first_step: tuple[int, float] | None = None
        self._mark = (self._began, 0)
        self._seconds_marked: dict[str, float] = {}

    @property
    def seconds(self) -> float:
        """Wall clock the run has been up, over all coordinator starts."""
        until = time.monotonic() if self._ended is None else self._ended
        return self.seconds_before + until - self._began

    def end(self) -> None:
        """Stop the clock: the run is over, though this process goes on to answer."""
        if self._ended is None:
            self._ended = time.monotonic()

    def eta(self, step: int, steps: int) -> float:
        """Return seconds left by the pace since this process' first step; -1 when unknown, or when the run is over."""
        if self._ended is not None or self._first_step is None or step <= self._first_step[0]:
            return -1.0
        first, since = self._first_step
        return (steps - step) * (time.monotonic() - since) / (step - first)

    def tokens_per_second(self, steps: int) -> float:
        """Return the mean speed over the last ``steps`` steps, 0 before the first."""
        last = self.points[-steps:]
        if not last:
            return 0.0
        begins = [self.points[-len(last) - 1].seconds if len(self.points) > len(last) else 0.0]
        begins += [point.seconds for point in last[:-1]]
        tokens = sum(p.tokens_per_second * (p.seconds - begin) for p, begin in zip(last, begins, strict=True))
        return tokens / max(1e-9, last[-1].seconds - begins[0])

    def since_last_step(self, updating: float) -> dict[str, float]:
        """Return seconds of each activity, and of the engines' weight updates added up (``updating`` is their sum since
        this process began), since the last call."""
        now = self.watches.seconds() | {"seconds_weight_updates": updating}
        before, self._seconds_marked = self._seconds_marked, now
        return {f"seconds/{name.removeprefix('seconds_')}": now[name] - before.get(name, 0.0) for name in now}

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
            "tokens_per_second": self.tokens_per_second(SMOOTHED_STEPS),
        }
