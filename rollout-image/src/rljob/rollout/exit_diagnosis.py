"""Describes why a server ended: by its exit code, the errors in its log, and the kernel's count of kills."""

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
    """Return how many processes the kernel has killed for lack of memory since the machine started; 0 if unknown."""
    try:
        counts = dict(line.split(maxsplit=1) for line in VMSTAT.read_text().splitlines())
    except OSError:
        return 0
    return int(counts.get("oom_kill", 0))


def describe_end(code: int, out_of_memory: bool) -> str:
    """Return how a server ended.

    Args:
        code: its exit code, or minus the signal that killed it.
        out_of_memory: whether the kernel killed a process for lack of memory meanwhile.
    """
    if code >= 0:
        return f"the engine server exited with code {code}"
    number = signal.Signals(-code)
    why = _SIGNALS.get(number, "")
    if number == signal.SIGKILL and out_of_memory:
        why = "memory ran out: lower rollouts.kvCacheBytes or maxConcurrency, or give it more memory"
    return f"the engine server was killed by {number.name}{f' ({why})' if why else ''}"


def first_error(lines: Iterable[str], prefix: str = "") -> str:
    """Return the first error in a log, which causes the others; empty if there is none.

    Finds exceptions of Python, with the first problem of one of pydantic's, and errors of argparse.

    Args:
        lines: of the log.
        prefix: regular expression of what the logger writes before the text of a line.
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
    text = re.sub(r" \[type=\w+, .*", "", text)  # pydantic's repetition of the input
    return text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}…"
