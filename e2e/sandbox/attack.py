"""What an attack on the sandbox is: programs, and the only outcome that they may have.

A program reads what it needs to know of its victim from standard input. ``attempt(action)`` prints one line: the name
of the error, or DONE. Numbers of system calls are those of x86_64.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PRELUDE = """
import ctypes, errno, json, mmap, os, resource, signal, socket, struct, subprocess, sys, threading, time
T = json.load(sys.stdin)
V, P = T["pid"], T["parent"]
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(number, *arguments)
    if result == -1:
        raise OSError(ctypes.get_errno(), "")
    return result
def attempt(action):
    try:
        action()
    except OSError as error:
        print(errno.errorcode.get(error.errno, error), flush=True)
    except BaseException as error:
        print(type(error).__name__, flush=True)
    else:
        print("DONE", flush=True)
def calls(*all):
    for number, *arguments in all:
        attempt(lambda: call(number, *arguments))
def read(*paths):
    for path in paths:
        attempt(lambda: open(path, "rb").read())
"""
REFUSALS = frozenset(("EPERM", "EACCES", "ENOENT", "ENOSYS"))
QUICK = {"wall_seconds": 0.3}
FILES = {"file_bytes": 1 << 20}

Outcome = Callable[[str, int, str], str]
"""Of output, wait status and reason; returns what is wrong, or nothing."""


@dataclass(frozen=True)
class Attack:
    """One attack. ``sources``: programs that run in this order; the outcome is that of the last one."""

    name: str
    sources: tuple[str, ...]
    outcome: Outcome
    limits: dict[str, Any] = field(default_factory=dict)


def refused(count: int, *more: str) -> Outcome:
    """``count`` attempts, each refused; ``more``: further errors that refuse."""

    def check(output: str, status: int, why: str) -> str:
        lines = output.split()
        wrong = [line for line in lines if line not in REFUSALS and line not in more]
        if status or why:
            return f"it ended with status {status} {why}: {output}"
        return f"not refused: {wrong}" if wrong else "" if len(lines) == count else f"{len(lines)} attempts: {output}"

    return check


def prints(*lines: str) -> Outcome:
    """It ends by itself, and this is its output."""
    expected = "".join(f"{line}\n" for line in lines)
    return lambda output, status, why: "" if (output, status, why) == (expected, 0, "") else f"{output} {status} {why}"


def ended(*reasons: str) -> Outcome:
    """The sandbox ends it, for one of these reasons."""
    return lambda output, status, why: "" if why in reasons and status == signal.SIGKILL else f"{output} {status} {why}"


def dies(*signals: int) -> Outcome:
    """The kernel ends it with one of these signals."""
    return lambda output, status, why: "" if status & 0x7F in signals and not why else f"{output} {status} {why}"


def anyhow(output: str, status: int, why: str) -> str:
    """Its end does not matter, only what it leaves behind."""
    return ""


def attack(name: str, source: str, outcome: Outcome, **limits: Any) -> Attack:
    """Return an attack by one program."""
    return Attack(name, (PRELUDE + source,), outcome, limits)
