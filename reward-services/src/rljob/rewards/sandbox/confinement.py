"""Confines the calling process to what a run may do: limits, no capabilities, Landlock, seccomp.

A forked child of the zygote calls :meth:`Confinement.enter` before it runs foreign code. Nothing undoes it.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
from collections.abc import Mapping

from rljob.rewards.sandbox import landlock
from rljob.rewards.sandbox.syscall_filter import SyscallFilter

OPEN_FILES = 64
FAILURE = 5
"""The last descriptor that is kept: to report an error of this module. Before it come standard input, output and error,
the source, and the channel to the other process of the run."""
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_CAPABILITIES_V3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


class Confinement:
    """The layers of one kind of run, prepared once: each run then makes few system calls.

    Args:
        read: files and directories that a run may read; None: Landlock is missing, which the manifest allows.
        scratch: directory in which a run may make files; empty: none.
        filtered: whether there is a seccomp filter.
    """

    def __init__(self, read: list[str] | None, scratch: str, filtered: bool) -> None:
        self._scratch = scratch
        self._ruleset = None if read is None else landlock.make_ruleset(_rights(read, scratch))
        self._filter = SyscallFilter(writing=bool(scratch)) if filtered else None

    def enter(self, parent: int, limits: Mapping[str, int]) -> None:
        """Confine this process, which has one thread. Errors must end it.

        Args:
            parent: process id of the zygote.
            limits: ``memory`` and ``files`` in bytes, ``cpu`` in seconds.

        Raises:
            OSError: the kernel refuses a layer.
        """
        _checked(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
        if os.getppid() != parent:
            raise OSError("the zygote has ended")
        _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        _set_limits(limits, limits["files"] if self._scratch else 0)
        _drop_capabilities()
        if self._ruleset is not None:
            landlock.enter(self._ruleset)
        os.closerange(FAILURE + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
        if self._filter is not None:
            self._filter.enter(os.getpid())


def _rights(read: list[str], scratch: str) -> dict[str, int]:
    rights = dict.fromkeys(read, landlock.READ) | dict.fromkeys(("/dev/zero", "/dev/urandom"), landlock.READ_FILE)
    rights["/dev/null"] = landlock.READ_FILE | landlock.WRITE_FILE
    if scratch:
        rights[scratch] = landlock.READ | landlock.WRITE_FILE | landlock.MAKE
    return {path: bits if os.path.isdir(path) else bits & landlock.OF_FILES for path, bits in rights.items()}


def _set_limits(limits: Mapping[str, int], file_bytes: int) -> None:
    for kind, limit in (
        (resource.RLIMIT_AS, limits["memory"]),
        (resource.RLIMIT_CPU, limits["cpu"]),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))


def _drop_capabilities() -> None:
    """Give up all capabilities, which only a service that runs as root has."""
    header = struct.pack("=Ii", _CAPABILITIES_V3, 0)
    _checked(_libc.capset(header, struct.pack("=6I", *[0] * 6)))


def _checked(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
