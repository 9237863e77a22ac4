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

    ``processor``: cores. ``memory``: bytes; a page shared by several processes is counted for each of them.
    ``processes``: None if unknown.
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
        self._cpu_seconds: dict[int, float] = {}  # by process id
        self._read_at = time.monotonic()

    def read(self) -> dict[str, Usage]:
        """Return component → its usage since the last call, or since the meter was created."""
        now, cpu_seconds = time.monotonic(), dict[int, float]()
        found: dict[str, list[tuple[float, int]]] = {}
        for pid, mark in process_cleanup.process_marks().items():
            component = mark.removeprefix(self._prefix).rstrip(":") if mark.startswith(self._prefix) else ""
            if component:
                try:
                    seconds, memory = _cpu_and_memory(Path(f"/proc/{pid}"))
                except OSError:  # the process has ended
                    continue
                cpu_seconds[pid] = seconds
                found.setdefault(component, []).append((seconds - self._cpu_seconds.get(pid, seconds), memory))
        elapsed = max(now - self._read_at, 1e-3)
        self._cpu_seconds, self._read_at = cpu_seconds, now
        return {
            component: Usage(
                len(measured), sum(cpu for cpu, _ in measured) / elapsed, sum(memory for _, memory in measured)
            )
            for component, measured in found.items()
        }


def _cpu_and_memory(entry: Path) -> tuple[float, int]:
    """Return CPU seconds and resident bytes of a process. ``entry``: its directory in /proc."""
    stat = (entry / "stat").read_text()
    fields = stat[stat.rindex(")") + 2 :].split()
    resident = int((entry / "statm").read_text().split()[1])
    return (int(fields[11]) + int(fields[12])) / _TICK, resident * _PAGE
