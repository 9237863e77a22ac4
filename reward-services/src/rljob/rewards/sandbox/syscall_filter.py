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

_Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, value
_Block = tuple[_Instruction, ...]
_ALLOW_BLOCK: _Block = ((_RETURN, 0, 0, _ALLOW),)
_REFUSE_BLOCK: _Block = ((_RETURN, 0, 0, _REFUSE),)
_OWN_PID = 0xFFFFFFFF
"""Stands for the process id until it is known."""
_PID = struct.Struct("=I")

_libc = ctypes.CDLL(None, use_errno=True)


def supported() -> bool:
    """Return whether the numbers are those of this machine's architecture."""
    return platform.machine() == "x86_64" and struct.calcsize("P") == 8


class SyscallFilter:
    """The filter without the process id of the program, which :meth:`enter` adds.

    The number of a call leads through a balanced tree of comparisons to what the filter does with the call. When a
    filter is loaded, the kernel follows every number that there is: after one comparison with each range of numbers it
    would need a tenth of a millisecond for that, in every run.

    Args:
        writing: whether the program may make, rename and remove files, as far as other layers let it.
    """

    def __init__(self, writing: bool) -> None:
        self._pids: list[int] = []  # where the process id belongs, in bytes
        code = self._build(writing)
        self._code = ctypes.create_string_buffer(code, len(code))
        self._program = struct.pack("HP", len(code) // 8, ctypes.addressof(self._code))

    @property
    def instructions(self) -> list[tuple[int, int, int, int]]:
        """Code, jump if true, jump if false and value of each instruction; the process id is 0."""
        return list(struct.iter_unpack("=HBBI", self._code.raw))

    def enter(self, pid: int) -> None:
        """Put the filter on this process for ever. It must have one thread, and no new privileges already.

        Args:
            pid: process id of this process, the only one that its system calls may name.

        Raises:
            OSError: the kernel refuses.
        """
        for place in self._pids:
            _PID.pack_into(self._code, place, pid)
        if _libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, self._program, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "the kernel refuses the seccomp filter")

    def _build(self, writing: bool) -> bytes:
        allowed = {*_FILES, *_MEMORY, *_TIME, *_SIGNALS, *_THREADS, *_IDENTITY, *_EVENTS, *_SOCKETS}
        actions = dict.fromkeys(allowed | set(_WRITING if writing else ()), _ALLOW_BLOCK)
        actions |= {
            72: _argument_in(1, _FCNTL),
            16: _argument_in(1, _IOCTL),
            157: _argument_in(0, _PRCTL),
            56: _argument_masked(0, _CLONE_THREAD | _CLONE_NAMESPACES, _CLONE_THREAD),  # clone
            53: _STREAM_PAIR,  # socketpair
            435: ((_RETURN, 0, 0, _ERRNO | errno.ENOSYS),),  # clone3: libc then calls clone
        }
        actions |= dict.fromkeys((62, 234), _own_pid(0))  # kill, tgkill: 0 is the group
        actions |= dict.fromkeys((302, 203, 204), _own_pid(0, 0))  # prlimit64, sched_setaffinity, sched_getaffinity
        starts = [(0, actions.get(0, _REFUSE_BLOCK))]
        for number in range(1, max(actions) + 2):
            action = actions.get(number, _REFUSE_BLOCK)
            if action != starts[-1][1]:
                starts.append((number, action))
        nodes: list[_Node] = []
        _grow(nodes, starts)
        head = [
            (_LOAD, 0, 0, _ARCHITECTURE),
            (_EQUAL, 1, 0, _X86_64),
            (_RETURN, 0, 0, _KILL_PROCESS),
            (_LOAD, 0, 0, _NUMBER),
            (_GREATER_EQUAL, 0, 1, _X32),
            (_RETURN, 0, 0, _KILL_PROCESS),
        ]
        return self._assemble(head, nodes)

    def _assemble(self, head: list[_Instruction], nodes: list[_Node]) -> bytes:
        """Return the instructions: the beginning, the tree, and each block once, to which the tree jumps."""
        places: dict[_Block, int] = {}
        tail: list[_Instruction] = []
        for node in nodes:
            for target in node.targets:
                if not isinstance(target, int) and target not in places:
                    places[target] = len(nodes) + len(tail)
                    tail += target
        tree = []
        for i, node in enumerate(nodes):
            below, above = ((target if isinstance(target, int) else places[target]) - i - 1 for target in node.targets)
            tree.append((_GREATER_EQUAL, above, below, node.number))
        code = bytearray()
        for instruction in (*head, *tree, *tail):
            if instruction[3] == _OWN_PID:
                self._pids.append(len(code) + 4)
                instruction = (*instruction[:3], 0)
            code += struct.pack("=HBBI", *instruction)
        return bytes(code)


class _Node:
    """A comparison of the tree: where numbers below ``number`` go, and the others: another node or a block."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.targets: list[int | _Block] = []


def _grow(nodes: list[_Node], starts: list[tuple[int, _Block]]) -> int | _Block:
    """Append the tree that finds the action of a number; return its place. ``starts``: first numbers of the ranges."""
    if len(starts) == 1:
        return starts[0][1]
    middle = len(starts) // 2
    place, node = len(nodes), _Node(starts[middle][0])
    nodes.append(node)
    node.targets = [_grow(nodes, starts[:middle]), _grow(nodes, starts[middle:])]
    return place


def _argument_in(argument: int, values: Iterable[int]) -> _Block:
    """Allow a call whose argument has one of the values in its lower half, as the kernel reads these arguments."""
    block = [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument)]
    for value in values:
        block += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    return (*block, *_REFUSE_BLOCK)


def _own_pid(argument: int, *others: int) -> _Block:
    """Allow a call on the process itself."""
    return _argument_in(argument, (*others, _OWN_PID))


def _argument_masked(argument: int, mask: int, value: int) -> _Block:
    load = ((_LOAD, 0, 0, _ARGUMENTS + 8 * argument), (_AND, 0, 0, mask))
    return (*load, (_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW), *_REFUSE_BLOCK)


_STREAM_PAIR = (
    (_LOAD, 0, 0, _ARGUMENTS),
    (_EQUAL, 0, 4, _UNIX),
    (_LOAD, 0, 0, _ARGUMENTS + 8),
    (_AND, 0, 0, 0xF),
    (_EQUAL, 0, 1, _STREAM),
    (_RETURN, 0, 0, _ALLOW),
    *_REFUSE_BLOCK,
)
"""A connected pair of stream sockets, which asyncio uses; a datagram socket could send to other names."""
