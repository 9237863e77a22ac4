"""Progress of a run: wall-clock time, seconds of each activity, and the history of its steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rljob.coordinator.engine_seconds import EngineSeconds
from rljob.coordinator.event_counts import EVENTS, EventCounts
from rljob.ledger.step_metrics import Metrics, history_point, staleness_counts
from rljob.protocol.run_status import HistoryPoint

STATUS_METRICS = (
    "reward/mean", "staleness/mean", "staleness/max", "response_length/trained_over_scored",
    "response_length/trained_ks_p", "response_length/cut_share",
    "dispatch/members_at_home", "dispatch/turns_at_home", "weights/update_seconds",
    "weights/pause_seconds",
)  # fmt: skip
"""Metrics in the status besides those of the trainer; metrics.jsonl has all metrics."""
ACTIVITIES = ("generating", "training", "updating_weights", "trainer_waiting")
"""Of which the seconds are measured, in the order of :meth:`Stopwatches.set_all`."""
ENGINE_SECONDS = "engine_seconds/"
SMOOTHED_STEPS = 8
"""Steps over which the reported tokens per second are averaged: engines work ahead, so one step may have no tokens."""


@dataclass(frozen=True)
class UpdateTotals:
    """Weight updates that engines have committed since the start of this process."""

    updates: int = 0  # one for each engine
    seconds: float = 0.0
    pause_seconds: float = 0.0  # in them, from the beginning of the pause to the end of the resume

    def plus(self, seconds: float, pause_seconds: float) -> UpdateTotals:
        """Return the totals with one more update."""
        return UpdateTotals(self.updates + 1, self.seconds + seconds, self.pause_seconds + pause_seconds)

    def means_since(self, before: UpdateTotals) -> Metrics:
        """Return the mean seconds and the mean pause of the updates after ``before``; empty if there are none."""
        updates = self.updates - before.updates
        if not updates:
            return {}
        return {
            "weights/update_seconds": (self.seconds - before.seconds) / updates,
            "weights/pause_seconds": (self.pause_seconds - before.pause_seconds) / updates,
        }


class Stopwatches:
    """Seconds of each activity since the start of this process. Activities overlap."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: dict[str, float] = {}
        self._total = dict.fromkeys(ACTIVITIES, 0.0)
        self._running: tuple[bool, ...] = ()  # of each activity

    def set_all(self, *running: bool) -> None:
        """Set whether each of ACTIVITIES is running now."""
        if running != self._running:
            self._running = running
            for activity, on in zip(ACTIVITIES, running, strict=True):
                self.set(activity, on)

    def set(self, activity: str, on: bool) -> None:
        """Set whether ``activity`` is running now."""
        began = self._since.get(activity)
        if on and began is None:
            self._since[activity] = self._clock()
        elif not on and began is not None:
            self._total[activity] += self._clock() - self._since.pop(activity)

    def seconds(self) -> dict[str, float]:
        """Return seconds_ACTIVITY → seconds."""
        at = self._clock()
        return {f"seconds_{name}": total + at - self._since.get(name, at) for name, total in self._total.items()}


class RunHistory:
    """The clock of a run, the history points of its steps, and the metrics of the last step.

    Args:
        clock: returns the seconds since any fixed moment.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.watches = Stopwatches(clock)
        self.engines = EngineSeconds(self._until)
        self.events = EventCounts()
        self.staleness: Counter[int] = Counter()  # of trained samples, since the start of the run
        self.before: dict[str, float] = {}  # seconds of engines and events in the steps of earlier processes
        self.points: list[HistoryPoint] = []
        self.last_step: Metrics = {}
        self.seconds_before = 0.0  # of earlier coordinator processes
        self._began = clock()
        self._ended: float | None = None
        self._first_step: tuple[int, float] | None = None
        self._mark = (self._began, 0)
        self._updates_marked = UpdateTotals()
        self._seconds_marked: dict[str, float] = {}

    @property
    def seconds(self) -> float:
        """Seconds that the run has been up, summed over all coordinator processes."""
        return self.seconds_before + self._until() - self._began

    def _until(self) -> float:
        return self._clock() if self._ended is None else self._ended

    def engine_seconds(self) -> Metrics:
        """Return engine_seconds/ACTIVITY → seconds of all engines since the start of the run."""
        before = self.before
        return {name: before.get(name, 0.0) + spent for name, spent in _engine_metrics(self.engines.seconds()).items()}

    def event_counts(self) -> dict[str, int]:
        """Return EVENT/REASON → count since the start of the run, of the reasons that occurred."""
        sums = {name: round(count + self.before.get(name, 0.0)) for name, count in self.events.metrics().items()}
        return {name.removeprefix(EVENTS): count for name, count in sums.items() if count}

    def end(self) -> None:
        """Stop the clock at the end of the run. The process continues to serve requests."""
        if self._ended is None:
            self._ended = self._clock()

    def eta(self, step: int, steps: int) -> float:
        """Return the estimated seconds left, from the speed since this process' first step; -1: unknown, or the run is
        over."""
        if self._ended is not None or self._first_step is None or step <= self._first_step[0]:
            return -1.0
        first, since = self._first_step
        return (steps - step) * (self._clock() - since) / (step - first)

    def tokens_per_second(self, steps: int) -> float:
        """Return the mean tokens per second over the last ``steps`` steps; 0 before the first step."""
        last = self.points[-steps:]
        if not last:
            return 0.0
        begins = [self.points[-len(last) - 1].seconds if len(self.points) > len(last) else 0.0]
        begins += [point.seconds for point in last[:-1]]
        tokens = sum(p.tokens_per_second * (p.seconds - begin) for p, begin in zip(last, begins, strict=True))
        return tokens / max(1e-9, last[-1].seconds - begins[0])

    def time_step(self, step: int, generated_tokens: int, updates: UpdateTotals) -> Metrics:
        """Return the timing metrics of a step that was just applied: seconds, tokens per second, seconds of activities
        and of weight updates; and the counts of events.

        Args:
            step: the applied step.
            generated_tokens: tokens since the start of this process.
            updates: of the engines since the start of this process.
        """
        at = self._clock()
        before, tokens = self._mark
        self._mark = (at, generated_tokens)
        if self._first_step is None:
            self._first_step = (step + 1, at)
        watched = self.watches.seconds() | {"seconds_weight_updates": updates.seconds}
        spent = _engine_metrics(self.engines.decided_seconds())  # each second is in one step
        spent |= self.events.metrics()
        marked, self._seconds_marked = self._seconds_marked, watched | spent
        means, self._updates_marked = updates.means_since(self._updates_marked), updates
        return {
            **{name: spent[name] - marked.get(name, 0.0) for name in spent},
            **means,
            "seconds": self.seconds,
            "tokens_per_second": (generated_tokens - tokens) / max(1e-9, at - before),
            **{f"seconds/{name.removeprefix('seconds_')}": watched[name] - marked.get(name, 0.0) for name in watched},
        }

    def add(self, step: int, metrics: Metrics) -> None:
        """Add an applied step with its metrics (see :mod:`rljob.ledger.step_metrics`)."""
        self.points.append(history_point(step, metrics))
        self.staleness.update(staleness_counts(metrics))
        self.last_step = metrics

    def summary(self) -> Metrics:
        """Return the status metrics of the last step, with the smoothed tokens per second; empty before the first
        step."""
        if not self.points:
            return {}
        selected = {n: x for n, x in self.last_step.items() if n in STATUS_METRICS or n.startswith("trainer/")}
        return selected | {"tokens_per_second": self.tokens_per_second(SMOOTHED_STEPS)}


def _engine_metrics(seconds: Mapping[str, float]) -> Metrics:
    return {f"{ENGINE_SECONDS}{activity}": spent for activity, spent in seconds.items()}
