"""Progress of a run in this process: its clock, seconds of each activity, the history of its steps."""

from __future__ import annotations

import time

from rljob.ledger.step_metrics import Metrics, history_point
from rljob.protocol.run_status import HistoryPoint

SHOWN = ("reward/mean", "staleness/mean", "staleness/max")
"""Metrics that the status shows beside the trainer's; metrics.jsonl has all."""
ACTIVITIES = ("generating", "training", "updating_weights", "trainer_waiting")
SMOOTHED_STEPS = 8
"""Of the speed that is shown: engines work ahead, so a step's own tokens may be none."""


class Stopwatches:
    """Seconds of each activity since this process began. Activities overlap."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._total = dict.fromkeys(ACTIVITIES, 0.0)

    def set(self, activity: str, on: bool) -> None:
        """Set whether ``activity`` is under way now."""
        began = self._since.get(activity)
        if on and began is None:
            self._since[activity] = time.monotonic()
        elif not on and began is not None:
            self._total[activity] += time.monotonic() - self._since.pop(activity)

    def seconds(self) -> dict[str, float]:
        """Return seconds_ACTIVITY of each."""
        at = time.monotonic()
        return {f"seconds_{name}": total + at - self._since.get(name, at) for name, total in self._total.items()}


class RunHistory:
    """The clock of a run, points of the steps applied, and the metrics of the last one."""

    def __init__(self) -> None:
        self.watches = Stopwatches()
        self.points: list[HistoryPoint] = []
        self.last_step: Metrics = {}
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
        """Stop the clock: the run is over, though this process continues to answer."""
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

    def time_step(self, step: int, generated_tokens: int, updating: float) -> Metrics:
        """End a step: return its seconds and tokens per second, as metrics.

        Args:
            step: that was applied.
            generated_tokens: since this process began.
            updating: seconds of the engines' weight updates since this process began, added up.
        """
        at = time.monotonic()
        before, tokens = self._mark
        self._mark = (at, generated_tokens)
        if self._first_step is None:
            self._first_step = (step + 1, at)
        watched = self.watches.seconds() | {"seconds_weight_updates": updating}
        marked, self._seconds_marked = self._seconds_marked, watched
        return {
            "seconds": self.seconds,
            "tokens_per_second": (generated_tokens - tokens) / max(1e-9, at - before),
            **{f"seconds/{name.removeprefix('seconds_')}": watched[name] - marked.get(name, 0.0) for name in watched},
        }

    def add(self, step: int, metrics: Metrics) -> None:
        """Add an applied step with its metrics (see :mod:`rljob.ledger.step_metrics`)."""
        self.points.append(history_point(step, metrics))
        self.last_step = metrics

    def summary(self) -> Metrics:
        """Return the metrics of the last step that the status shows, with the speed of late; none before the first."""
        if not self.points:
            return {}
        shown = {n: x for n, x in self.last_step.items() if n in SHOWN or n.startswith("trainer/")}
        return shown | {"tokens_per_second": self.tokens_per_second(SMOOTHED_STEPS)}
