"""Finds the processes of a run by a mark in their environment, wherever they are, and kills them.

A part's children may have left its process group (an engine server in a session of its own, workers of torchrun), and
survive when the part is killed; they do inherit its environment. Run as a program this is the guardian of a run: it
waits for the end of its standard input, which is the death of ``rljob run`` however it dies, and then sweeps.

Standard library only: the guardian starts with ``python -I -S`` in milliseconds.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

MARK = "RLJOB_LOCAL_PART"
"""Variable whose value is RUN_DIRECTORY:PART: in every process of a part."""

GIVE_UP_SECONDS = 5.0


def marked(prefix: str) -> list[int]:
    """Return the ids of living processes of this user whose mark begins with ``prefix``, but this one's."""
    wanted = f"{MARK}={prefix}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:  # gone, or another user's
            continue
        if any(variable.startswith(wanted) for variable in environment.split(b"\0")):
            found.append(int(entry.name))
    return found


def sweep(prefix: str) -> int:
    """Kill all processes whose mark begins with ``prefix``; return how many there were.

    Returns when none is left or after GIVE_UP_SECONDS, which only a process stuck in the kernel takes.
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
        time.sleep(0.005)  # they are not our children: their end cannot be waited for
    return len(killed)


def _guard(prefix: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while sys.stdin.buffer.read(4096):
        pass
    sweep(prefix)


if __name__ == "__main__":
    _guard(sys.argv[1])
