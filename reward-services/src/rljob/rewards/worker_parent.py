"""The parent of a worker: a process between service and worker that ends what the worker leaves behind.

A process whose parent has ended becomes a child of the nearest subreaper above it, also if it has a session of its own
(a daemon). With a subreaper for each worker, all processes that a reward starts stay descendants of that subreaper. It
reaps them, kills them when the worker has ended or the service has, and then ends as the worker did.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from typing import NoReturn

from rljob.protocol.parent_death import die_with_parent
from rljob.rewards.orphans import adopt_orphans, kill_descendants

_SIGNALS = {signal.SIGCHLD, signal.SIGTERM}


def fork_from_parent() -> None:
    """Fork; return in the new process, the worker. The calling process stays as its parent and never returns.

    The kernel must send the parent SIGTERM when the service ends.

    Raises:
        OSError: no process is left.
    """
    adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    of_reward = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    parent = os.getpid()
    worker = os.fork()
    if worker:
        _stay(worker)
    die_with_parent(parent)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL if of_reward is None else of_reward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _stay(worker: int) -> NoReturn:
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the service must see that the worker's socket is closed
    status = _end_of(worker)
    kill_descendants()
    with contextlib.suppress(ChildProcessError):  # there is none left
        while True:
            os.waitpid(-1, 0)
    _end_like(status)


def _end_of(worker: int) -> int:
    """Return the wait status of the worker, or that of a process killed by SIGTERM if the service has ended."""
    while signal.sigwait(_SIGNALS) == signal.SIGCHLD:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == worker:
                return ended[1]
    return signal.SIGTERM


def _end_like(status: int) -> NoReturn:
    """End with a wait status, so that the service sees how the worker ended."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.kill(os.getpid(), -code)
    os._exit(code & 255)
