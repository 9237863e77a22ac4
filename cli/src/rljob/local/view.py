"""What there is to see of a run at one moment: plain data that screens draw."""

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
    """One process of the run, in a cluster one role of the job."""

    name: str
    state: str
    restarts: int
    death: str = ""
    """How it ended last, in words."""
    detail: str = ""
    """What is to be known of it besides: in a cluster its pods."""


@dataclass
class View:
    """The run now. ``status`` is None until the coordinator answers."""

    job: str
    place: Path | str
    """The run directory; in a cluster context and namespace."""
    phase: str = "starting"
    """What goes on while the coordinator does not answer."""
    ending: str = ""
    """What goes on since the run was told to end."""
    detail: str = ""
    """Last line of the log of what is under way, while that is one process."""
    note: str = ""
    """What is to be known of all this: that it is old, for example."""
    status: RunStatus | None = None
    parts: list[PartView] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Wall clock since this ``rljob run`` began."""
        return time.monotonic() - self.began

    @property
    def stage(self) -> str:
        """What goes on, in a few words."""
        if self.ending or self.status is None:
            return self.ending or self.phase
        message = f": {self.status.message}" if self.status.message else ""
        return f"{self.status.state.lower()}{message}"


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


def speed(status: RunStatus) -> float:
    """Return the tokens sampled in a second: a mean over some steps, of a run that is done over all."""
    last = status.history[-1].tokens_per_second if status.history else 0.0
    return metrics(status).get("tokens_per_second", last)


def deaths(view: View) -> list[str]:
    """Return how parts and engine servers that were restarted ended last."""
    found = [f"{part.name} {part.death}" for part in view.parts if part.death]
    for part in view.status.parts if view.status else []:
        if part.message:
            found.append(f"engine of {part.instance}: {part.message}")
    return found


def one_line(view: View) -> str:
    """Return the run as one line of text."""
    status = view.status
    if status is None or not status.history:
        return f"{clock(view.seconds)}  {view.stage}"
    last = status.history[-1]
    left = f"  {clock(status.progress.eta_seconds)} left" if status.progress.eta_seconds >= 0 else ""
    return (
        f"{clock(view.seconds)}  step {status.progress.step}/{status.progress.steps}  reward {last.reward:.3f}  "
        f"staleness {last.staleness:.2f}  {speed(status):,.0f} tokens/s{left}  {view.stage}"
    )
