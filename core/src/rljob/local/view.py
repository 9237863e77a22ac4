"""What there is to see of a local run at one moment: plain data that screens draw and the run fills."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rljob.protocol.status import RunStatus

BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass
class PartView:
    """One process of the run."""

    name: str
    state: str
    restarts: int


@dataclass
class View:
    """The run now. ``status`` is None until the coordinator answers."""

    job: str
    directory: Path
    phase: str = "starting"
    detail: str = ""
    """Last line of the log of what is under way, while that is one process."""
    status: RunStatus | None = None
    parts: list[PartView] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Wall clock since this ``rljob run`` began."""
        return time.monotonic() - self.began


def clock(seconds: float) -> str:
    """Return a duration as 1:05 or 2:01:05."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the course of ``values`` as ``width`` block characters at most, each a mean of its share of them."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [i * len(values) // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    if low == high:
        return BLOCKS[0] * count
    return "".join(BLOCKS[round((mean - low) / (high - low) * (len(BLOCKS) - 1))] for mean in means)


def metrics(status: RunStatus) -> dict[str, float]:
    """Return the figures of now by name."""
    return {metric.name: metric.value for metric in status.metrics}


def one_line(view: View) -> str:
    """Return the run as one line of text."""
    status = view.status
    if status is None:
        return f"{clock(view.seconds)}  {view.phase}"
    if not status.history:
        waiting = f": {status.message}" if status.message else ""
        return f"{clock(view.seconds)}  {status.state.lower()}{waiting}"
    last = status.history[-1]
    left = f"  {clock(status.progress.eta_seconds)} left" if status.progress.eta_seconds >= 0 else ""
    return (
        f"{clock(view.seconds)}  step {status.progress.step}/{status.progress.steps}  reward {last.reward:.3f}  "
        f"staleness {last.staleness:.2f}  {last.tokens_per_second:,.0f} tokens/s{left}  {status.state.lower()}"
    )
