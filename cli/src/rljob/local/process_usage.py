"""Measures CPU and memory of a run's components, each with its process tree.

The mark in the environment of a process, or of an ancestor, names its component (:mod:`rljob.local.process_cleanup`).
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from rljob.local import process_cleanup, processes

_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Usage:
    """Usage of one component.

    ``processor``: cores. ``memory``: bytes; pages shared by its processes count in each. ``processes``:
    None if unknown.
    """

    processes: int | None
    processor: float
    memory: int


class ProcessUsageMeter:
    """Measures between calls of :meth:`read`.

    Args:
        directory: the run directory.
    """

    def __init__(self, directory: Path) -> None:
        self._prefix = processes.mark(directory)
        self._before: dict[int, float] = {}  # process → processor seconds
        self._at = time.monotonic()

    def read(self) -> dict[str, Usage]:
        """Return component → its usage since the last call, or since the meter was made."""
        at, now = time.monotonic(), dict[int, float]()
        found: dict[str, list[tuple[float, int]]] = {}
        for pid, mark in process_cleanup.process_marks().items():
            component = mark.removeprefix(self._prefix).rstrip(":") if mark.startswith(self._prefix) else ""
            if component:
                try:
                    seconds, memory = _figures(Path(f"/proc/{pid}"))
                except OSError:  # gone
                    continue
                now[pid] = seconds
                found.setdefault(component, []).append((seconds - self._before.get(pid, seconds), memory))
        passed = max(at - self._at, 1e-3)
        self._before, self._at = now, at
        return {
            component: Usage(
                len(figures), sum(cpu for cpu, _ in figures) / passed, sum(memory for _, memory in figures)
            )
            for component, figures in found.items()
        }


def _figures(entry: Path) -> tuple[float, int]:
    """Return processor seconds and resident bytes of a process."""
    stat = (entry / "stat").read_text()
    fields = stat[stat.rindex(")") + 2 :].split()
    resident = int((entry / "statm").read_text().split()[1])
    return (int(fields[11]) + int(fields[12])) / _TICK, resident * _PAGE
