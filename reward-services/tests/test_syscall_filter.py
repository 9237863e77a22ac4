"""The seccomp filter, followed instruction by instruction as the kernel does it."""

from __future__ import annotations

import struct

import pytest

from rljob.rewards.sandbox import syscall_filter
from rljob.rewards.sandbox.syscall_filter import SyscallFilter

ALLOW, REFUSE, NO_SUCH_CALL, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
X86_64, I386 = 0xC000003E, 0x40000003
CLONE, KILL_CALL, FCNTL, SOCKETPAIR, CLONE3, PRLIMIT = 56, 62, 72, 53, 435, 302
OWN = 0  # the process id before enter() writes it


def follow(made: SyscallFilter, number: int, *arguments: int, architecture: int = X86_64) -> tuple[int, int]:
    """Return what the filter does with a call, and how many instructions that takes."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    code, place, value, steps = made.instructions, 0, 0, 0
    while True:
        kind, then, otherwise, operand = code[place]
        place, steps = place + 1, steps + 1
        if kind == 0x20:
            (value,) = struct.unpack_from("=I", data, operand)
        elif kind == 0x54:
            value &= operand
        elif kind == 0x15:
            place += then if value == operand else otherwise
        elif kind == 0x35:
            place += then if value >= operand else otherwise
        else:
            assert kind == 0x06
            return operand, steps


@pytest.fixture(scope="module", params=[False, True], ids=["reading", "writing"])
def made(request: pytest.FixtureRequest) -> SyscallFilter:
    return SyscallFilter(writing=request.param)


def test_the_listed_calls_are_allowed_and_no_other(made: SyscallFilter) -> None:
    lists = ("_FILES", "_MEMORY", "_TIME", "_SIGNALS", "_THREADS", "_IDENTITY", "_EVENTS", "_SOCKETS")
    listed = {number for name in lists for number in getattr(syscall_filter, name)} - {CLONE, SOCKETPAIR}
    writing = follow(made, 82)[0] == ALLOW
    listed |= set(syscall_filter._WRITING) if writing else set()
    own = {KILL_CALL, 234, PRLIMIT, 203, 204}  # their first argument is 0 here, the own process id
    allowed = {number for number in range(2000) if follow(made, number)[0] == ALLOW}
    assert allowed == listed | own | {FCNTL}
    assert {follow(made, number)[0] for number in set(range(2000)) - allowed} == {REFUSE, NO_SUCH_CALL}
    assert follow(made, CLONE3)[0] == NO_SUCH_CALL


@pytest.mark.parametrize("number", [41, 57, 58, 59, 101, 165, 272, 308, 319, 322, 425, 250, 321, 323, 298, 42, 49, 50])
def test_what_attacks_need_is_refused(made: SyscallFilter, number: int) -> None:
    """socket, fork, vfork, execve, ptrace, mount, unshare, setns, memfd_create, …"""
    assert follow(made, number)[0] == REFUSE


@pytest.mark.parametrize(
    ("number", "arguments", "outcome"),
    [
        (KILL_CALL, [OWN], ALLOW),
        (KILL_CALL, [1], REFUSE),
        (KILL_CALL, [0xFFFFFFFF], REFUSE),
        (PRLIMIT, [4711], REFUSE),
        (CLONE, [0x3D0F00], ALLOW),  # a thread of libc
        (CLONE, [0x01200011], REFUSE),  # fork
        (CLONE, [0x10000 | 0x10000000], REFUSE),  # a thread in a user namespace
        (FCNTL, [0, 8], REFUSE),  # F_SETOWN
        (FCNTL, [0, 10], REFUSE),  # F_SETSIG
        (FCNTL, [0, 1030], ALLOW),  # F_DUPFD_CLOEXEC
        (SOCKETPAIR, [1, 1 | 0x80000], ALLOW),
        (SOCKETPAIR, [1, 2], REFUSE),  # datagrams
        (SOCKETPAIR, [2, 1], REFUSE),
        (16, [0, 0x5412], REFUSE),  # TIOCSTI
        (157, [22], REFUSE),  # prctl: seccomp
    ],
)
def test_arguments_decide(made: SyscallFilter, number: int, arguments: list[int], outcome: int) -> None:
    assert follow(made, number, *arguments)[0] == outcome


def test_numbers_of_another_architecture_kill(made: SyscallFilter) -> None:
    assert follow(made, 1, architecture=I386)[0] == KILL
    assert follow(made, 0x40000001)[0] == KILL


def test_the_kernel_needs_few_steps_for_each_number(made: SyscallFilter) -> None:
    """It follows each one when a run loads the filter."""
    assert max(follow(made, number)[1] for number in range(500)) <= 30
