"""The overall time-out of a benchmark.

The main function of every benchmark calls :func:`limit` before it starts a process. The benchmark then continues in a
child process, so the time-out also ends a benchmark that blocks in a system call or in C code. At the time-out the
child receives SIGINT and has GRACE_SECONDS to stop what it started; after that it is killed. The parent is a child
subreaper (prctl(2)): every process that the benchmark started is its descendant, whatever session the process is in.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import sys
import time
from types import TracebackType
from typing import NamedTuple

import psutil

GRACE_SECONDS = 30.0
"""From SIGINT to SIGKILL."""
CLEANUP_SECONDS = 10.0
"""After the benchmark's end, for processes that clean up after it, such as the reaper of a run."""
KILL_SECONDS = 10.0
"""From SIGKILL until a process counts as stuck in the kernel."""
_POLL_SECONDS = 0.05
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = {signal.SIGCHLD, signal.SIGINT, signal.SIGTERM}
_libc = ctypes.CDLL(None, use_errno=True)


def add_option(parser: argparse.ArgumentParser, seconds: float) -> None:
    """Add the option --timeout with the default ``seconds``."""
    text = f"time-out in seconds; the benchmark then fails and its processes are ended (default {seconds:g})"
    parser.add_argument("--timeout", type=_positive, default=seconds, metavar="SECONDS", help=text)


def _positive(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError("must be more than 0 seconds")
    return seconds


def limit(name: str, seconds: float) -> None:
    """Return in a child process that may run for ``seconds``; the calling process waits and never returns.

    The calling process exits with the exit code of the child, or with 1 and one message on stderr at the time-out.
    SIGINT and SIGTERM end the child in the same way. No process that the child started outlives the calling process.
    Call this in the main thread, before any thread is started.

    Args:
        name: of the benchmark, for the message.
        seconds: from now.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _prepare_child(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return
    code = 1
    try:
        code = _supervise(child, name, seconds)
    finally:
        sys.stderr.flush()
        os._exit(code)  # atexit handlers belong to the child


def _prepare_child(parent: int) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent exited before prctl
        os._exit(1)
    os.setpgid(0, 0)  # Ctrl-C of the terminal reaches only the parent, which sends SIGINT once
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background programs with SIGINT ignored
    sys.excepthook = _excepthook


def _excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):  # the parent reports why the benchmark was interrupted
        sys.__excepthook__(kind, error, traceback)


class _Wait(NamedTuple):
    """The reason for which a wait ended; without a field: the time-out."""

    exit_code: int | None = None
    signal: int | None = None


def _supervise(child: int, name: str, seconds: float) -> int:
    """Wait until no process of the program is left; return the exit code of the whole program."""
    ended = _wait(child, seconds)
    code = ended.exit_code
    if code is None:
        os.kill(child, signal.SIGINT)
        if _wait(child, GRACE_SECONDS).exit_code is None:
            os.kill(child, signal.SIGKILL)
        code = 1 if ended.signal is None else 128 + ended.signal
    stuck = _end_descendants()
    if ended == _Wait():
        sys.stderr.write(f"{name} did not end within {seconds:g} s (--timeout), so its processes were ended\n")
    if stuck:
        sys.stderr.write(f"{name}: processes {stuck} could not be killed\n")
    return code


def _wait(child: int, seconds: float) -> _Wait:
    """Wait until the child has exited, a signal arrives or the time is over."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        received = signal.sigtimedwait(_SIGNALS, left)
        if received is not None and received.si_signo != signal.SIGCHLD:
            return _Wait(signal=received.si_signo)
        exited = _reap()
        if child in exited:
            code = os.waitstatus_to_exitcode(exited[child])
            return _Wait(exit_code=code if code >= 0 else 128 - code)
    return _Wait()


def _reap() -> dict[int, int]:
    """Return process id → wait status of all children that have exited."""
    exited = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            exited[found[0]] = found[1]
    return exited


def _end_descendants() -> list[int]:
    """Wait for processes that clean up, then kill the remaining ones; return those that survive SIGKILL."""
    start = time.monotonic()
    while _has_children():
        elapsed = time.monotonic() - start
        if elapsed > CLEANUP_SECONDS:
            left = psutil.Process().children(recursive=True)
            if elapsed > CLEANUP_SECONDS + KILL_SECONDS:
                return [process.pid for process in left]
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        time.sleep(_POLL_SECONDS)
    return []


def _has_children() -> bool:
    """Reap, and return whether a child is left: a descendant whose parent has exited becomes a child."""
    _reap()
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
