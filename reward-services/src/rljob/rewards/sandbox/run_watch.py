"""What ends a run that no limit of the kernel ends: the clock, threads, files.

The kernel ends a program that has used its CPU time. The clock is for programs that sleep: time in which the machine
had no CPU for the program is no evidence that the program is slow. A run that waited for a CPU until the end is
*starved*, which is no verdict. So is a sample whose runs have waited for most of its time.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from rljob.rewards.sandbox.scratch_directory import ScratchExceededError, check_use

MAX_THREADS = 64
MAX_WAITING = 5
"""How many times its limit a run may wait for a CPU of a busy machine, beside its own time."""
STARVED = "starved"
MOST = MAX_WAITING / (1 + MAX_WAITING)
"""Share of its time after which a run, or a sample, that waited for a CPU is starved."""


class CpuUse(NamedTuple):
    """What a process has had of the CPUs.

    ``runnable``: whether a thread uses a CPU or waits for one. ``spent``: CPU seconds of its threads. ``waited``: the
    longest time for which one of its threads waited for a CPU and then got it, in seconds.
    """

    runnable: bool
    spent: float
    waited: float


class RunWatch:
    """The time, threads and files of a run.

    Args:
        scratch: directory in which the run may make files; empty: none.
        request: ``processes``, ``seconds``: of the clock.
        start: of the run, by the clock.
        now: the clock, in seconds.
        read: returns the CPU use of a process.
    """

    def __init__(
        self,
        scratch: str,
        request: dict[str, Any],
        start: float,
        now: Callable[[], float] = time.monotonic,
        read: Callable[[int], CpuUse] | None = None,
    ) -> None:
        self._scratch = scratch
        self._processes = request["processes"]
        self._seconds: float = request["seconds"]
        self._now = now
        self._read = read or cpu_use
        self._start = self._seen = start
        self.slept = 0.0
        """Seconds of the run in which none of its processes used a CPU or waited for one, up to the last look."""

    def reason(self, pids: Sequence[int], look: bool) -> str:
        """Return the reason to end the run: time, starved, threads, files; empty: there is none.

        ``look``: whether to look for sleep, threads and files.
        """
        if look:
            seen, self._seen = self._seen, self._now()
            if not any(self._read(pid).runnable for pid in pids):
                self.slept += self._seen - seen
        return self._late(pids) or (self._excess(pids) if look else "")

    def _late(self, pids: Sequence[int]) -> str:
        """Return whether the run has used its time, without that in which its processes waited for a CPU.

        A process that is runnable computes or waits. A wait that has not ended is in no counter of the kernel, and one
        of a container whose CPU time is limited never is, so only the CPU seconds of such a process are its own.
        """
        passed = self._now() - self._start
        if passed < self._seconds:
            return ""
        if passed - self.waited(pids) >= self._seconds:
            return "time"
        return STARVED if passed >= self._seconds * (1 + MAX_WAITING) else ""

    def waited(self, pids: Sequence[int], running: bool = True) -> float:
        """Return for how many seconds of the run its processes have waited for a CPU.

        ``running``: whether the run continues, so that a runnable process has been waiting since it last had a CPU.
        """
        passed = self._now() - self._start
        uses = [self._read(pid) for pid in pids]
        others = passed - sum(use.spent for use in uses)
        if running and any(use.runnable for use in uses):
            return others
        return min(others, sum(use.waited for use in uses))

    def _excess(self, pids: Sequence[int]) -> str:
        for pid, process in zip(pids, self._processes, strict=True):
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{pid}/task").st_nlink - 2 > MAX_THREADS:
                    return "threads"
            if process["files"]:
                try:
                    check_use(self._scratch, pid, process["limits"]["files"])
                except ScratchExceededError:
                    return "files"
        return ""


def cpu_use(pid: int) -> CpuUse:
    """Return the CPU use of a process; what the kernel does not say is False and 0."""
    threads = [CpuUse(False, 0.0, 0.0), *_threads(pid)]
    return CpuUse(
        any(thread.runnable for thread in threads),
        sum(thread.spent for thread in threads),
        max(thread.waited for thread in threads),
    )


def _threads(pid: int) -> Iterator[CpuUse]:
    tasks = f"/proc/{pid}/task"
    with contextlib.suppress(OSError):
        for task in os.listdir(tasks):
            with contextlib.suppress(OSError, ValueError, IndexError):  # the thread has ended
                with open(f"{tasks}/{task}/stat", "rb") as file:
                    runnable = file.read().rpartition(b")")[2].split()[0] == b"R"
                spent = waited = 0
                with contextlib.suppress(FileNotFoundError), open(f"{tasks}/{task}/schedstat", "rb") as file:
                    spent, waited = (int(field) for field in file.read().split()[:2])
                yield CpuUse(runnable, spent / 1e9, waited / 1e9)
