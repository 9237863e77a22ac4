"""Finds the processes of a run by a mark in their environment and kills them.

Children of a component may have left its process group (an engine server in its own session, workers of torchrun) and
survive when it is killed; they inherit its environment, or have a parent that did. As a program this is the reaper of a
run: it waits for the end of its standard input, which is the end of ``rljob run`` by whatever cause, and then kills all
processes of the run.

Standard library only: the reaper starts with ``python -I -S`` in milliseconds.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

MARK = "RLJOB_LOCAL_PART"
"""Variable with the value RUN_DIRECTORY:COMPONENT: in every process of a component."""

GIVE_UP_SECONDS = 5.0


class ProcessInfo(NamedTuple):
    """A process as /proc shows it."""

    state: str  # T: stopped, as by SIGSTOP; Z: dead, and its parent has not asked for its exit code
    parent: int


def marked(prefix: str) -> list[int]:
    """Return the ids of this user's living processes whose mark begins with ``prefix``, and of their descendants;
    without this process."""
    return [pid for pid, mark in process_marks().items() if mark.startswith(prefix)]


def process_marks() -> dict[int, str]:
    """Return process id → mark of this user's living processes, by their own or an ancestor's; without this process."""
    processes = _processes()
    found = {pid: _mark(pid, processes) for pid in processes}
    return {pid: mark for pid, mark in found.items() if mark is not None}


def any_stopped(prefix: str) -> bool:
    """Return whether a process whose mark begins with ``prefix`` is stopped, as by SIGSTOP."""
    processes = _processes()
    stopped = (_mark(pid, processes) for pid, process in processes.items() if process.state == "T")
    return any(mark is not None and mark.startswith(prefix) for mark in stopped)


def _processes() -> dict[int, ProcessInfo]:
    """Return process id → process of all living processes but this one."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    found = {pid: _look(pid) for pid in pids if pid != os.getpid()}
    return {pid: process for pid, process in found.items() if process is not None and process.state not in "ZX"}


def _look(pid: int) -> ProcessInfo | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:  # gone
        return None
    state, parent = stat[stat.rindex(b")") + 2 :].split()[:2]  # the name in brackets before it may hold anything
    return ProcessInfo(state.decode(), int(parent))


def _mark(pid: int, processes: dict[int, ProcessInfo]) -> str | None:
    """Return the mark of a process or its nearest ancestor that has one: a process that sets its title, as
    engines do, overwrites its environment in /proc."""
    while pid in processes:
        mark = _own_mark(pid)
        if mark is not None:
            return mark
        pid = processes[pid].parent
    return None


def _own_mark(pid: int) -> str | None:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone, or another user's
        return None
    variable = next((one for one in environment.split(b"\0") if one.startswith(f"{MARK}=".encode())), None)
    return None if variable is None else os.fsdecode(variable).partition("=")[2]


def kill_marked(prefix: str) -> int:
    """Kill all processes whose mark begins with ``prefix``; return their number.

    Returns when none is left, or after GIVE_UP_SECONDS if a process is stuck in the kernel.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + GIVE_UP_SECONDS
    while (pids := marked(prefix)) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        killed.update(pids)
        time.sleep(0.005)  # they are not children of this process: wait() is not possible
    return len(killed)


def _reap(prefix: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while sys.stdin.buffer.read(4096):
        pass
    kill_marked(prefix)


if __name__ == "__main__":
    _reap(sys.argv[1])
