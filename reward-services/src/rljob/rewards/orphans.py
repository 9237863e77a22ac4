"""Processes that a reward starts: they end with their worker.

What a worker started are the descendants of its parent (:mod:`rljob.rewards.worker_parent`), and the processes of the
session that the parent leads. They are stopped before they are killed, because a process that is not stopped can start
another one in the meantime.

The service adopts and reaps what a parent leaves that was killed itself. In a pod the service is process 1, which
adopts processes in any case.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

_PR_SET_CHILD_SUBREAPER = 36
SECONDS = 1.0
STOP_ROUNDS = 50
STOP_PAUSE_SECONDS = 0.001


class _ProcessInfo(NamedTuple):
    state: str  # T: stopped; Z: ended, not reaped
    parent: int
    session: int


def kill_with_descendants(leader: int) -> None:
    """Kill the leader of a session, which is not reaped yet, its descendants and its session."""
    _send({leader, *_stopped(leader)}, signal.SIGKILL)


def kill_descendants() -> None:
    """Kill the descendants of this process, which leads a session, and its session."""
    _send(_stopped(os.getpid()).keys() - {os.getpid()}, signal.SIGKILL)


def _stopped(leader: int) -> dict[int, _ProcessInfo]:
    """Stop what the leader of a session has started, and the leader if it is another process; return them all."""
    known: dict[int, _ProcessInfo] = {}
    for _ in range(STOP_ROUNDS):  # until all of them are stopped and none is new
        before = known.keys()
        known = _started_by(leader)
        others = {pid: process for pid, process in known.items() if pid != os.getpid()}
        if known.keys() <= before and all(process.state in "TtZX" for process in others.values()):
            break
        _send(others, signal.SIGSTOP)
        time.sleep(STOP_PAUSE_SECONDS)
    return known


def _started_by(leader: int) -> dict[int, _ProcessInfo]:
    """Return process id → state of the leader of a session, its descendants and its session."""
    processes = _processes()
    found: dict[int, _ProcessInfo] = {}
    pending = {leader, *(pid for pid, process in processes.items() if process.session == leader)}
    while pending:
        found |= {pid: processes[pid] for pid in pending if pid in processes}
        pending = {pid for pid, process in processes.items() if process.parent in pending} - found.keys()
    return found


def _processes() -> dict[int, _ProcessInfo]:
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            stat = Path("/proc", name, "stat").read_bytes()
        except OSError:  # the process has ended
            continue
        # The name of the program in brackets precedes these fields, and may contain any character.
        state, parent, _, session = stat[stat.rindex(b")") + 2 :].split()[:4]
        found[int(name)] = _ProcessInfo(state.decode(), int(parent), int(session))
    return found


def _send(pids: Collection[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or changed its user
            os.kill(pid, number)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parents end.

    Raises:
        OSError: the kernel rejects the request.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl rejects PR_SET_CHILD_SUBREAPER")


async def keep_reaping(workers: Collection[int]) -> None:
    """Reap ended orphans every SECONDS until the task is cancelled. ``workers``: see :func:`reap_orphans`."""
    while True:
        reap_orphans(workers)
        await asyncio.sleep(SECONDS)


def reap_orphans(workers: Collection[int]) -> None:
    """Reap the children that have ended, are not of this process's session and not in ``workers``, which the pool
    reaps."""
    with contextlib.suppress(ChildProcessError):  # there is no child
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in workers or os.getsid(ended.si_pid) == os.getsid(0):
                return  # a worker, which the pool reaps soon, or a process that the service started
            os.waitpid(ended.si_pid, 0)
