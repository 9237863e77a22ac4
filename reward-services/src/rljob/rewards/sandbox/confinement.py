"""Confines the calling process to what a run may do: limits, no capabilities, Landlock, seccomp.

A forked child of the zygote calls :meth:`Confinement.enter` before it runs foreign code. Nothing undoes it.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from rljob.rewards.sandbox import landlock
from rljob.rewards.sandbox.syscall_filter import SyscallFilter

OPEN_FILES = 64
FAILURE = 5
"""The last descriptor that is kept: to report an error of this module. Before it come standard input, output and error,
the source, and the channel to the other process of the run."""
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_CAPABILITIES_V3 = 0x20080522
_Call = tuple[Any, ...]
"""A function of the C library that returns 0, and its arguments."""

_libc = ctypes.CDLL(None, use_errno=True)


class Confinement:
    """The layers of one kind of run, prepared once: each run then makes few system calls.

    A forked process copies every page of memory that it writes to, and Python writes to every object that it uses. The
    part of this class that runs after the fork therefore is one loop over calls of the C library.

    Args:
        read: files and directories that a run may read; None: Landlock is missing, which the manifest allows.
        scratch: directory in which a run may make files; empty: none.
        filtered: whether there is a seccomp filter.
    """

    def __init__(self, read: list[str] | None, scratch: str, filtered: bool) -> None:
        self._scratch = scratch
        self._ruleset = None if read is None else landlock.make_ruleset(_rights(read, scratch))
        self._filter = SyscallFilter(writing=bool(scratch)) if filtered else None
        self._most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._prepared: dict[tuple[int, ...], tuple[_Call, ...]] = {}

    def prepare(self, limits: Mapping[str, int]) -> tuple[_Call, ...]:
        """Return the calls for a process with these limits, for :meth:`enter`.

        Args:
            limits: ``memory`` and ``files`` in bytes, ``cpu`` in seconds.
        """
        key = (limits["memory"], limits["files"], limits["cpu"])
        if key not in self._prepared:
            self._prepared[key] = tuple(self._calls(*key))
        return self._prepared[key]

    def enter(self, parent: int, calls: tuple[_Call, ...]) -> None:
        """Confine this process, which has one thread. Errors must end it.

        Args:
            parent: process id of the zygote.
            calls: of :meth:`prepare`.

        Raises:
            OSError: the kernel refuses a layer.
        """
        for function, *arguments in calls:
            if function(*arguments) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        os.closerange(FAILURE + 1, self._most_files)
        if os.getppid() != parent:  # it has ended before its death became a reason for a signal
            raise OSError("the zygote has ended")
        if self._filter is not None:
            self._filter.enter(os.getpid())

    def _calls(self, memory: int, files: int, cpu: int) -> Iterator[_Call]:
        yield _libc.prctl, _PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0
        yield _libc.prctl, _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0
        limits = {
            resource.RLIMIT_AS: memory,
            resource.RLIMIT_CPU: cpu,
            resource.RLIMIT_FSIZE: files if self._scratch else 0,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MSGQUEUE: 0,
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_NOFILE: OPEN_FILES,
        }
        for kind, limit in limits.items():
            hard = resource.getrlimit(kind)[1]
            limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            yield _libc.setrlimit, kind, struct.pack("=QQ", limit, limit)
        # All capabilities are given up, which only a service that runs as root has.
        yield _libc.capset, struct.pack("=Ii", _CAPABILITIES_V3, 0), struct.pack("=6I", *[0] * 6)
        if self._ruleset is not None:
            yield landlock.entering(self._ruleset)


def _rights(read: list[str], scratch: str) -> dict[str, int]:
    rights = dict.fromkeys(read, landlock.READ) | dict.fromkeys(("/dev/zero", "/dev/urandom"), landlock.READ_FILE)
    rights["/dev/null"] = landlock.READ_FILE | landlock.WRITE_FILE
    if scratch:
        rights[scratch] = landlock.READ | landlock.WRITE_FILE | landlock.MAKE
    return {path: bits if os.path.isdir(path) else bits & landlock.OF_FILES for path, bits in rights.items()}
