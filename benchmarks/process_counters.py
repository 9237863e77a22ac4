"""Counters of another process, from /proc."""

from __future__ import annotations

import os
from pathlib import Path

TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")
"""Resolution of CPU times."""


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_SECONDS


def memory_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_memory_bytes(pid: int) -> int:
    """Return the largest resident memory of a process so far. The peak of getrusage() would not do: a process that was
    started has at least that of the one that started it."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
