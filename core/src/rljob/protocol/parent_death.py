"""Processes that die with the process that started them (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # loaded on import: nothing may be loaded between fork and exec


def set_parent_death_signal(number: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel send this process a signal when the thread that forked it ends. Safe between fork and exec.

    Raises:
        OSError: the kernel rejects the request.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, number) != 0:
        raise OSError(ctypes.get_errno(), "prctl rejects PR_SET_PDEATHSIG")


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent process ``parent`` dies; at once if ``parent`` is dead already.

    Raises:
        OSError: the kernel rejects the request.
    """
    set_parent_death_signal()
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
