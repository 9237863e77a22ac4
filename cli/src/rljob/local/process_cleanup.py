"""Finds the processes of a run by a mark in their environment and kills them.

Children of a component may have left its process group (an engine server in its own session, workers of torchrun) and
survive when it is killed. They inherit the environment of the component, directly or through a parent. As a program
this module is the reaper of a run: its standard input ends when ``rljob run`` ends for any reason, and it then kills
all processes of the run.

Standard library only: the reaper starts with ``python -I -S`` in milliseconds.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

MARK = "RLJOB_LOCAL_COMPONENT"
"""Environment variable of every process of a component; its value is RUN_DIRECTORY:COMPONENT:."""

KILL_TIMEOUT_SECONDS = 5.0


class ProcessInfo(NamedTuple):
    """State and parent of a process, from /proc."""

    state: str  # T: stopped, for example by SIGSTOP; Z: zombie, its parent has not read its exit code
    parent: int


def marked(prefix: str) -> list[int]:
    """Return the ids of this user's running processes whose mark begins with ``prefix``, and of their descendants,
    except this process."""
    return [pid for pid, mark in process_marks().items() if mark.startswith(prefix)]


def process_marks() -> dict[int, str]:
    """Return process id → mark of this user's running processes except this one; a mark may be an ancestor's."""
    processes = _processes()
    found = {pid: _mark(pid, processes) for pid in processes}
    return {pid: mark for pid, mark in found.items() if mark is not None}


def any_stopped(prefix: str) -> bool:
    """Return whether a process whose mark begins with ``prefix`` is stopped, for example by SIGSTOP."""
    processes = _processes()
    stopped = (_mark(pid, processes) for pid, process in processes.items() if process.state == "T")
    return any(mark is not None and mark.startswith(prefix) for mark in stopped)


def _processes() -> dict[int, ProcessInfo]:
    """Return process id → state of all running processes except this one."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    found = {pid: _process_info(pid) for pid in pids if pid != os.getpid()}
    return {pid: process for pid, process in found.items() if process is not None and process.state not in "ZX"}


def _process_info(pid: int) -> ProcessInfo | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:  # the process has ended
        return None
    # The name of the program in brackets precedes these fields, and may contain any character.
    state, parent = stat[stat.rindex(b")") + 2 :].split()[:2]
    return ProcessInfo(state.decode(), int(parent))


def _mark(pid: int, processes: dict[int, ProcessInfo]) -> str | None:
    """Return the mark of a process, or of its nearest ancestor with a mark: engines set their process title, which
    overwrites the environment in /proc."""
    while pid in processes:
        mark = _own_mark(pid)
        if mark is not None:
            return mark
        pid = processes[pid].parent
    return None


def _own_mark(pid: int) -> str | None:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # the process has ended, or belongs to another user
        return None
    variable = next((one for one in environment.split(b"\0") if one.startswith(f"{MARK}=".encode())), None)
    return None if variable is None else os.fsdecode(variable).partition("=")[2]


def kill_marked(prefix: str) -> int:
    """Kill all processes whose mark begins with ``prefix``; return their number.

    Returns when none is left, or after KILL_TIMEOUT_SECONDS if a process is stuck in the kernel.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + KILL_TIMEOUT_SECONDS
    while (pids := marked(prefix)) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        killed.update(pids)
        time.sleep(0.005)  # wait() is not possible: they are not children of this process
    return len(killed)


def _reap(prefix: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while sys.stdin.buffer.read(4096):
        pass
    kill_marked(prefix)


if __name__ == "__main__":
    _reap(sys.argv[1])
