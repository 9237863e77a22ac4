"""How code of a sample ended a runner's process, for the next process, which reports it to the coordinator.

Nothing of rljob runs while code of a sample blocks the event loop, or holds the interpreter, or ends the process. So
two files beside the heartbeat, which outlive the process, have what the next one must know:

- ``.sample``: whose code runs now (:mod:`rljob.runner.sample_tasks`). It is mapped into memory and written before the
  code runs.
- ``.traceback``: where the code is. It is empty until the event loop is late, or the process crashes. faulthandler
  writes it from a thread that does not need the interpreter, or from a signal handler.

Without a traceback no sample is named: a process may be killed at random, or stopped.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import mmap
import os
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

from rljob.protocol.runner_protocol import RunnerEnd
from rljob.runner.sample_tasks import RECORD_BYTES, RunningSample, read_record

log = logging.getLogger(__name__)

CHECKS = 4
"""Of the event loop in the time after which it is late."""
MOST_TRACEBACK = 1 << 20
"""Bytes of a traceback that are read."""
_FATAL = re.compile(r"Fatal Python error: (.*)")
_FRAME = re.compile(r'File "(.*)", line (\d+) in (\S+)')


@dataclass(frozen=True)
class ProcessRecord:
    """``running``: whose code runs in this process. ``before``: how code of a sample ended the process before."""

    running: RunningSample = field(default_factory=RunningSample)
    before: RunnerEnd | None = None


@asynccontextmanager
async def recording(heartbeat: str | None, late_seconds: float) -> AsyncIterator[ProcessRecord]:
    """Record how this process ends, in files beside ``heartbeat`` (None: there is no next process), and return what the
    process before recorded.

    Args:
        heartbeat: path of the heartbeat.
        late_seconds: an event loop that does not run for this long is late.
    """
    if not heartbeat:
        yield ProcessRecord()
        return
    sample, traceback = _paths(heartbeat)
    with ExitStack() as stack:
        try:
            before = read_end(heartbeat, late_seconds)
            record, trace = _mapped(sample), stack.enter_context(FileIO(traceback, "a"))
            trace.truncate(0)
        except OSError as error:  # the runner works without
            log.warning("how this process ends cannot be recorded: %s", error)
            yield ProcessRecord()
            return
        stack.enter_context(_traced(trace, late_seconds))
        yield ProcessRecord(RunningSample(record), before)


def read_end(heartbeat: str, late_seconds: float) -> RunnerEnd | None:
    """Return how code of a sample ended the process that recorded beside ``heartbeat``; None if it did not.

    Raises:
        OSError: a file cannot be read.
    """
    sample, path = _paths(heartbeat)
    traceback = _read(path).decode(errors="replace")
    if not traceback:
        return None
    owner = read_record(_read(sample))
    if fatal := _FATAL.search(traceback):
        how = f"it crashed its runner ({fatal[1]})"
    else:
        blocked = path.stat().st_mtime - owner.since if owner is not None else 0.0
        how = f"it blocked the event loop of its runner for {blocked:.3g} s"
        if blocked < late_seconds / 2:
            owner = None  # the code of several samples, one after the other, made the event loop late
    if owner is None:
        log.error("the process before this one was late, or crashed, but not by the code of one sample\n%s", traceback)
        return None
    log.error("sample %s ended the process before this one: %s\n%s", owner.sample, how, traceback)
    return RunnerEnd(owner.sample, owner.lease, f"{how}{_place(traceback)}")


def _paths(heartbeat: str) -> tuple[Path, Path]:
    return Path(f"{heartbeat}.sample"), Path(f"{heartbeat}.traceback")


def _read(path: Path) -> bytes:
    with suppress(FileNotFoundError), path.open("rb") as file:
        return file.read(MOST_TRACEBACK)
    return b""


def _place(traceback: str) -> str:
    """Return where the thread of the event loop was, or the one that crashed; empty if no frame is known."""
    _, current, crashed = traceback.partition("Current thread")
    threads = (crashed if current else traceback).split("(most recent call first):")[1:]
    frames: list[tuple[str, str, str]] = _FRAME.findall(threads[0 if current else -1]) if threads else []
    for path, line, function in frames:  # the main thread is the last one
        if path != __file__:
            return f", in {function} ({path}:{line})"
    return ""


def _mapped(path: Path) -> mmap.mmap:
    """Return the mapped file. It stays mapped as long as tasks of samples refer to it."""
    path.write_bytes(bytes(RECORD_BYTES))  # a full disk is an error here, and not of a later write to memory
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), RECORD_BYTES)


@contextmanager
def _traced(trace: FileIO, late_seconds: float) -> Iterator[None]:
    """Write to ``trace`` when this process crashes, or its event loop is late."""
    faulthandler.enable(trace)
    os.register_at_fork(after_in_child=faulthandler.disable)  # it would write the crash of a child here
    watch = asyncio.get_running_loop().create_task(_watch(trace, late_seconds))
    try:
        yield
    finally:
        watch.cancel()
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()


async def _watch(trace: FileIO, late_seconds: float) -> None:
    """Log where the event loop was late, once it runs again."""
    while True:
        faulthandler.dump_traceback_later(late_seconds, repeat=True, file=trace)
        await asyncio.sleep(late_seconds / CHECKS)
        faulthandler.cancel_dump_traceback_later()
        try:
            if os.fstat(trace.fileno()).st_size:
                text = _read(Path(trace.name)).decode(errors="replace")
                log.warning("the event loop of this runner was late; a loop must not block\n%s", text)
                trace.truncate(0)
        except OSError as error:
            log.warning("where the event loop was late cannot be read: %s", error)
