"""The timeline of a simulated run in Chrome's trace format, which https://ui.perfetto.dev shows.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Times are microseconds of
virtual time. The trainer and each engine are a process. Weight updates of an engine are its thread 0, its slots follow.
"""

from __future__ import annotations

from typing import Any

from rljob.protocol.agent_protocol import RequestId
from rljob.protocol.trainer_protocol import Train

TRAINER = 0
"""Process id of the trainer; engines follow."""
UPDATES = 0
"""Thread id of weight updates."""


class Timeline:
    """A recorder of :mod:`rljob.simulation.simulated_engine`."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._processes = {"trainer": TRAINER}

    def generated(self, engine: str, slot: int, request: RequestId, start: float, end: float, work: float) -> None:
        """Add a request."""
        arguments = {"turn": request.turn, "attempt": request.attempt, "work": work}
        self._add(request.sample, "generate", self._process(engine), UPDATES + 1 + slot, start, end, arguments)

    def updated(self, engine: str, version: int, start: float, end: float) -> None:
        """Add a weight update."""
        self._add(f"weights {version}", "weights", self._process(engine), UPDATES, start, end, {})

    def trained(self, batch: Train, start: float, end: float) -> None:
        """Add a step of the trainer."""
        ages = [batch.step - sample.min_version for sample in batch.samples]
        arguments = {"samples": len(ages), "mean staleness": sum(ages) / len(ages)}
        self._add(f"step {batch.step}", "train", TRAINER, 0, start, end, arguments)

    def to_json(self) -> dict[str, Any]:
        """Return the trace as JSON values."""
        names = [
            {"name": "process_name", "ph": "M", "pid": number, "args": {"name": name}}
            for name, number in self._processes.items()
        ]
        return {"displayTimeUnit": "ms", "traceEvents": names + self._events}

    def _process(self, name: str) -> int:
        return self._processes.setdefault(name, len(self._processes))

    def _add(
        self, name: str, category: str, process: int, thread: int, start: float, end: float, arguments: dict[str, Any]
    ) -> None:
        self._events.append(
            {
                "name": name,
                "cat": category,
                "ph": "X",
                "pid": process,
                "tid": thread,
                "ts": start * 1e6,
                "dur": (end - start) * 1e6,
                "args": arguments,
            }
        )
