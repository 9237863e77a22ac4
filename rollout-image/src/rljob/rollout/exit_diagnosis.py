"""Describes why a server ended, from its exit code, the errors in its log, and the kernel's count of OOM kills."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from pathlib import Path

VMSTAT = Path("/proc/vmstat")

_SIGNALS = {
    signal.SIGSEGV: "a memory fault",
    signal.SIGBUS: "a memory fault, or /dev/shm is full",
    signal.SIGABRT: "it aborted",
    signal.SIGILL: "an instruction that this CPU does not have",
}
_EXCEPTION = r"((?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt)): *(.*)"
_USAGE = r"[\w.-]+: (error): (.+)"  # argparse's
_DETAIL = re.compile(r"^\s*(?:Value error|Assertion failed), (.+)")  # pydantic's, below its headline
_LONGEST_ERROR = 500  # characters


def oom_kills() -> int:
    """Return how many processes the kernel has killed because of low memory since boot; 0 if unknown."""
    try:
        counts = dict(line.split(maxsplit=1) for line in VMSTAT.read_text().splitlines())
    except OSError:
        return 0
    return int(counts.get("oom_kill", 0))


def describe_end(code: int, out_of_memory: bool, process: str = "the engine server") -> str:
    """Return how a server, or one of its processes, ended.

    Args:
        code: its exit code, or minus the signal that killed it.
        out_of_memory: whether the kernel killed any process because of low memory while the server ran.
        process: name for the message.
    """
    if code >= 0:
        return f"{process} exited with code {code}"
    number = signal.Signals(-code)
    why = _SIGNALS.get(number, "")
    if number == signal.SIGKILL and out_of_memory:
        why = "memory ran out: lower rollouts.kvCacheBytes or maxConcurrency, or give it more memory"
    return f"{process} was killed by {number.name}{f' ({why})' if why else ''}"


def first_error(lines: Iterable[str], prefix: str = "") -> str:
    """Return the first error in a log, because later errors usually follow from it; empty if there is none.

    Finds Python exceptions, errors of argparse, and the first problem of a pydantic ValidationError.

    Args:
        lines: of the log.
        prefix: regular expression of the logger's prefix of a line.
    """
    error = re.compile(f"^(?:{prefix})(?:{_EXCEPTION}|{_USAGE})")
    headline = ""
    for line in lines:
        detail = _DETAIL.match(line)
        if headline and detail:
            return _short(detail[1])
        found = error.match(line)
        if headline or found is None:
            continue
        name, text, _, usage = found.groups()
        headline = usage or f"{name.rpartition('.')[2]}: {text}".removesuffix(": ")
        if "validation error" not in headline:
            return _short(headline)
    return _short(headline)


def _short(text: str) -> str:
    text = re.sub(r" \[type=\w+, .*", "", text)  # pydantic repeats the input here
    return text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}…"
