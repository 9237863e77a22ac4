"""A seccomp filter: the system calls that a program in the sandbox may make. All others fail with EPERM.

The list suffices for the standard library without processes and sockets, threads and asyncio included. A program cannot
fork or execute, so its limit of address space bounds the whole run, and one SIGKILL ends it.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Iterable

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_REFUSE = _ERRNO | errno.EPERM
_LOAD, _EQUAL, _GREATER_EQUAL, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_X86_64, _X32 = 0xC000003E, 0x40000000
_CLONE_THREAD, _CLONE_NAMESPACES = 0x00010000, 0x7E020080

# Numbers of x86_64.
_FILES = (
    *(*range(9), 17, 18, 19, 20, 21, 22, 32, 33, 40, 74, 75, 77, 78, 79, 80, 81, 95, 217, 221, 257, 262, 269, 285),
    *(292, 293, 295, 296, 326, 327, 328, 332, 436, 439),
)  # read, write, open, close, stat, lseek, pipe, dup, …
_MEMORY = (9, 10, 11, 12, 25, 27, 28)  # mmap, mprotect, munmap, brk, mremap, mincore, madvise
_TIME = (34, 35, 36, 37, 38, 96, 98, 100, 201, 228, 229, 230)  # pause, nanosleep, timers, gettimeofday, clocks, times
_SIGNALS = (13, 14, 15, 127, 128, 130, 131, 219, 282, 289)  # of the process itself
_THREADS = (24, 56, 60, 61, 186, 202, 218, 231, 273, 324, 334)  # exit, wait4, futex, …; clone: threads only
_IDENTITY = (39, 63, 97, 99, 102, 104, 107, 108, 110, 111, 115, 118, 120, 318)  # getpid, uname, getuid, getrandom, …
_EVENTS = (23, 213, 232, 233, 270, 271, 281, 283, 284, 286, 287, 290, 291, 441)  # poll, select, epoll, eventfd, …
_SOCKETS = (44, 45, 46, 47, 48, 51, 52, 53, 55)  # of a pair: send, receive, shutdown, names; socketpair: streams only
_WRITING = (82, 83, 84, 86, 87, 88, 89, 258, 263, 264, 265, 266, 267, 316)  # rename, mkdir, link, unlink, readlink, …

_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032, 1034)  # not F_SETOWN, F_SETSIG, F_SETPIPE_SZ
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
_PRCTL = (15, 16, 0x53564D41)  # names of threads and of memory
_UNIX, _STREAM = 1, 1

_libc = ctypes.CDLL(None, use_errno=True)


def supported() -> bool:
    """Return whether the numbers are those of this machine's architecture."""
    return platform.machine() == "x86_64" and struct.calcsize("P") == 8


class SyscallFilter:
    """The filter without the process id of the program, which :meth:`enter` adds.

    Args:
        writing: whether the program may make, rename and remove files, as far as other layers let it.
    """

    def __init__(self, writing: bool) -> None:
        self._code = bytearray()
        self._pids: list[int] = []  # where the process id belongs
        self._build(writing)

    def enter(self, pid: int) -> None:
        """Put the filter on this process for ever. It must have one thread, and no new privileges already.

        Args:
            pid: process id of this process, the only one that its system calls may name.

        Raises:
            OSError: the kernel refuses.
        """
        for place in self._pids:
            struct.pack_into("=I", self._code, place, pid)
        instructions = (ctypes.c_char * len(self._code)).from_buffer(self._code)
        program = struct.pack("HP", len(self._code) // 8, ctypes.addressof(instructions))
        if _libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, program, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "the kernel refuses the seccomp filter")

    def _build(self, writing: bool) -> None:
        self._add(_LOAD, _ARCHITECTURE)
        self._add(_EQUAL, _X86_64, 1, 0)
        self._add(_RETURN, _KILL_PROCESS)
        self._add(_LOAD, _NUMBER)
        self._add(_GREATER_EQUAL, _X32, 0, 1)
        self._add(_RETURN, _KILL_PROCESS)
        self._allow_argument(72, 1, _FCNTL)
        self._allow_argument(16, 1, _IOCTL)
        self._allow_argument(157, 0, _PRCTL)
        for number, argument in ((62, 0), (234, 0), (302, 0), (203, 0), (204, 0)):
            self._allow_own_pid(number, argument)  # kill, tgkill, prlimit64, sched_setaffinity, sched_getaffinity
        self._allow_masked(56, 0, _CLONE_THREAD | _CLONE_NAMESPACES, _CLONE_THREAD)
        self._allow_stream_pair()
        self._refuse(435, errno.ENOSYS)  # clone3: libc then calls clone
        always = {*_FILES, *_MEMORY, *_TIME, *_SIGNALS, *_THREADS, *_IDENTITY, *_EVENTS, *_SOCKETS}
        always -= {56, 53}
        for first, last in _ranges(always | set(_WRITING if writing else ())):
            self._add(_GREATER_EQUAL, first, 0, 2)
            self._add(_GREATER_EQUAL, last + 1, 1, 0)
            self._add(_RETURN, _ALLOW)
        self._add(_RETURN, _REFUSE)

    def _add(self, code: int, value: int, then: int = 0, otherwise: int = 0) -> None:
        self._code += struct.pack("=HBBI", code, then, otherwise, value)

    def _refuse(self, number: int, error: int) -> None:
        self._add(_EQUAL, number, 0, 1)
        self._add(_RETURN, _ERRNO | error)

    def _allow_argument(self, number: int, argument: int, values: Iterable[int]) -> None:
        """Allow a call whose argument has one of the values in its lower half, as the kernel reads these arguments."""
        values = tuple(values)
        self._add(_EQUAL, number, 0, 2 * len(values) + 2)
        self._add(_LOAD, _ARGUMENTS + 8 * argument)
        for value in values:
            self._add(_EQUAL, value, 0, 1)
            self._add(_RETURN, _ALLOW)
        self._add(_RETURN, _REFUSE)

    def _allow_own_pid(self, number: int, argument: int) -> None:
        """Allow a call on the process itself; 0 means that too, except for kill, where it is the group."""
        values = (0,) if number not in (62, 234) else ()
        self._add(_EQUAL, number, 0, 2 * len(values) + 4)
        self._add(_LOAD, _ARGUMENTS + 8 * argument)
        for value in values:
            self._add(_EQUAL, value, 0, 1)
            self._add(_RETURN, _ALLOW)
        self._pids.append(len(self._code) + 4)
        self._add(_EQUAL, 0, 0, 1)
        self._add(_RETURN, _ALLOW)
        self._add(_RETURN, _REFUSE)

    def _allow_masked(self, number: int, argument: int, mask: int, value: int) -> None:
        self._add(_EQUAL, number, 0, 5)
        self._add(_LOAD, _ARGUMENTS + 8 * argument)
        self._add(_AND, mask)
        self._add(_EQUAL, value, 0, 1)
        self._add(_RETURN, _ALLOW)
        self._add(_RETURN, _REFUSE)

    def _allow_stream_pair(self) -> None:
        """Allow a connected pair of stream sockets, which asyncio uses; a datagram socket could send to other names."""
        self._add(_EQUAL, 53, 0, 7)
        self._add(_LOAD, _ARGUMENTS)
        self._add(_EQUAL, _UNIX, 0, 4)
        self._add(_LOAD, _ARGUMENTS + 8)
        self._add(_AND, 0xF)
        self._add(_EQUAL, _STREAM, 0, 1)
        self._add(_RETURN, _ALLOW)
        self._add(_RETURN, _REFUSE)


def _ranges(numbers: set[int]) -> list[tuple[int, int]]:
    """Return the ranges of consecutive numbers, first and last."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ranges
