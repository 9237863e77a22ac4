"""Results of the soak: a table while it runs, figures and targets at the end."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.report import target
from e2e.soak.fault import FaultError

MIN_FAULTS = 60
CHECK = "check"
"""Family of outcomes that are no faults: the start and the end of a run."""


@dataclass(frozen=True)
class Outcome:
    """The result of a fault or a check: ``seconds`` from its end until the run had recovered; ``problem`` is empty on
    success."""

    family: str
    fault: str
    seconds: float
    problem: str = ""


@dataclass
class RunResult:
    """The result of one run. ``audits``: each one's output if it was not clean, else an empty text."""

    staleness: int
    outcomes: list[Outcome] = field(default_factory=list)
    audits: list[str] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    began: float = field(default_factory=time.monotonic)

    @property
    def failed(self) -> bool:
        """Whether the run did not survive something."""
        return any(outcome.problem for outcome in self.outcomes)

    def add(self, *outcomes: Outcome) -> None:
        """Add outcomes and print their lines of the table."""
        self.outcomes += outcomes
        for outcome in outcomes:
            sys.stderr.write(line(self.staleness, time.monotonic() - self.began, outcome))
        sys.stderr.flush()

    @contextlib.contextmanager
    def checking(self, what: str) -> Iterator[None]:
        """Add the outcome of the check inside."""
        began, problem = time.monotonic(), ""
        try:
            yield
        except FaultError as error:
            problem = str(error)
        except TimeoutError:
            problem = "time-out"
        self.add(Outcome(CHECK, what, time.monotonic() - began, problem))

    def end(self, steps: int, audits: list[str]) -> None:
        """Record the end of the run."""
        self.steps, self.audits, self.seconds = steps, audits, time.monotonic() - self.began


def header() -> str:
    """Return the head of the table."""
    return f"{'α':>1}  {'at':>6}  {'family':8} {'fault':52} {'recovered':>9}  result\n"


def line(staleness: int, at: float, outcome: Outcome) -> str:
    """Return the line of an outcome; ``at``: seconds since the start of its run."""
    result = outcome.problem or ("ok" if outcome.family == CHECK else "survived")
    return f"{staleness}  {at:5.0f} s  {outcome.family:8} {outcome.fault:52} {outcome.seconds:7.1f} s  {result}\n"


def figures(runs: list[RunResult], seconds: float, settings: dict[str, Any]) -> dict[str, Any]:
    """Return all figures of a soak that took ``seconds``; ``settings`` are copied."""
    faults = [outcome for run in runs for outcome in run.outcomes if outcome.family != CHECK]
    recovered = [fault.seconds for fault in faults if not fault.problem]
    return {
        **settings,
        "minutes": round(seconds / 60, 1),
        "faults": len(faults),
        "recovery_seconds_p50": round(statistics.median(recovered), 1) if recovered else None,
        "recovery_seconds_max": round(max(recovered), 1) if recovered else None,
        "families": {
            family: {
                "injected": sum(fault.family == family for fault in faults),
                "survived": sum(fault.family == family and not fault.problem for fault in faults),
            }
            for family in dict.fromkeys(fault.family for fault in faults)
        },
        "runs": [
            {
                "maxStaleness": run.staleness,
                "seconds": round(run.seconds, 1),
                "steps": run.steps,
                "audits": len(run.audits),
                "outcomes": [asdict(outcome) | {"seconds": round(outcome.seconds, 1)} for outcome in run.outcomes],
            }
            for run in runs
        ],
    }


def targets(
    runs: list[RunResult], seconds: float, minutes: float, not_run: list[str], min_faults: int = MIN_FAULTS
) -> dict[str, Any]:
    """Return the targets.

    Args:
        runs: all runs.
        seconds: that they took.
        minutes: that they may take.
        not_run: families that this machine cannot inject.
        min_faults: number of faults to inject.
    """
    outcomes = [outcome for run in runs for outcome in run.outcomes]
    return {
        "faults": target(sum(outcome.family != CHECK for outcome in outcomes), ">=", min_faults),
        "not_survived": target(sum(bool(outcome.problem) for outcome in outcomes), "<=", 0),
        "audits_not_clean": target(sum(bool(audit) for run in runs for audit in run.audits), "<=", 0),
        "families_not_run": target(len(not_run), "<=", 0),
        "minutes": target(round(seconds / 60, 1), "<=", minutes),
    }
