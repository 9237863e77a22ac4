"""Why a server ended, in words: from its exit code, from what it wrote last, and from the kernel's count of kills."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from pathlib import Path

VMSTAT = Path("/proc/vmstat")

_SIGNALS = {
    signal.SIGSEGV: "a memory fault",
    signal.SIGBUS: "a memory fault, or /dev/shm is full",
    signal.SIGABRT: "it gave up by itself",
    signal.SIGILL: "an instruction that this CPU does not have",
}
_PREFIX = r"^(?:\([^)]*\)\s*)*(?:ERROR\s.*?\]\s*)?"  # vLLM's: (EngineCore pid=7) ERROR 01-31 12:00:00 [core.py:1]
_EXCEPTION = re.compile(_PREFIX + r"((?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt)): *(.*)")
_USAGE = re.compile(_PREFIX + r"[\w.-]+: (error): (.+)")
_DETAIL = re.compile(r"^\s*(?:Value error|Assertion failed), (.+)")  # pydantic's, below its headline
_LONGEST_ERROR = 500  # characters


def oom_kills() -> int:
    """Return how many processes the kernel has killed for want of memory since the machine started, if it says."""
    try:
        counts = dict(line.split(maxsplit=1) for line in VMSTAT.read_text().splitlines())
    except OSError:
        return 0
    return int(counts.get("oom_kill", 0))


def describe_end(code: int, out_of_memory: bool) -> str:
    """Return how a server ended.

    Args:
        code: its exit code, or minus the signal that killed it.
        out_of_memory: whether the kernel killed some process for want of memory meanwhile.
    """
    if code >= 0:
        return f"the engine server exited with code {code}"
    number = signal.Signals(-code)
    why = _SIGNALS.get(number, "")
    if number == signal.SIGKILL and out_of_memory:
        why = "memory ran out: lower rollouts.kvCacheBytes or maxConcurrency, or give it more memory"
    return f"the engine server was killed by {number.name}{f' ({why})' if why else ''}"


def first_error(lines: Iterable[str]) -> str:
    """Return the first error named in a log, the one that the others follow from; empty when there is none."""
    headline = ""
    for line in lines:
        detail = _DETAIL.match(line)
        if headline and detail:
            return _short(detail[1])
        found = _EXCEPTION.match(line) or _USAGE.match(line)
        if headline or found is None:
            continue
        headline = f"{found[1].rpartition('.')[2]}: {found[2]}".removeprefix("error: ").removesuffix(": ")
        if "validation error" not in headline:
            return _short(headline)
    return _short(headline)


def _short(text: str) -> str:
    text = re.sub(r" \[type=\w+, .*", "", text)  # pydantic's repetition of the input
    return text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}…"
