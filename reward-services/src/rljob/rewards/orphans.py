"""Processes that a killed worker leaves behind: the service adopts them and reaps them when they end.

In a pod the service is process 1, which adopts them in any case. They end by themselves when their worker is gone, and
have a session of their own, unlike the workers, which the pool reaps.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os

_PR_SET_CHILD_SUBREAPER = 36
SECONDS = 1.0


def adopt_orphans() -> None:
    """Become the parent of descendants whose parents end.

    Raises:
        OSError: the kernel rejects the request.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl rejects PR_SET_CHILD_SUBREAPER")


async def keep_reaping() -> None:
    """Reap ended orphans every SECONDS until the task is cancelled."""
    while True:
        reap_orphans()
        await asyncio.sleep(SECONDS)


def reap_orphans() -> None:
    """Reap the children that have ended and are not of this process's session."""
    with contextlib.suppress(ChildProcessError):  # there is no child
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if os.getsid(ended.si_pid) == os.getsid(0):
                return  # a worker; the pool reaps it soon
            os.waitpid(ended.si_pid, 0)
