"""Tasks of samples: the one in which the loop of a sample runs, and those that its loop starts.

asyncio lets SystemExit and KeyboardInterrupt of any task end the event loop, and so the runner with all its samples. In
a task of a sample they are an error of the sample. While such a task runs, the sample is in a record, from which the
next process reads it.
"""

from __future__ import annotations

import asyncio
import mmap
import struct
import time
from collections.abc import Coroutine, Generator
from contextvars import ContextVar, copy_context
from typing import Any, NamedTuple

from rljob.runner.context import TrajectoryError
from rljob.runner.error_text import described_error

_RECORD = struct.Struct("56sd")
"""Number of the lease, a space, and the sample; Unix time."""
RECORD_BYTES = _RECORD.size
NOBODY = b""


class RunningSample:
    """The sample whose code the event loop runs now, and since when, written to ``record`` before the code runs."""

    def __init__(self, record: bytearray | mmap.mmap | None = None) -> None:
        self._record = bytearray(RECORD_BYTES) if record is None else record
        self._now = NOBODY

    def replace(self, owner: bytes) -> bytes:
        """Record an owner of the event loop; return the one before."""
        before, self._now = self._now, owner
        _RECORD.pack_into(self._record, 0, owner, time.time())
        return before


class Recorded(NamedTuple):
    """What a record has. ``since``: Unix time at which the event loop began to run code of the sample."""

    sample: str
    lease: int
    since: float


def read_record(record: bytes) -> Recorded | None:
    """Return what a record has; None if no sample is in it."""
    if len(record) != RECORD_BYTES:
        return None
    owner, since = _RECORD.unpack(record)
    lease, _, sample = owner.rstrip(b"\0").decode(errors="replace").partition(" ")
    return Recorded(sample, int(lease), since) if sample and lease.isdecimal() else None


class Owner(NamedTuple):
    """A sample, and where it is recorded while a task of it runs."""

    running: RunningSample
    name: bytes

    @staticmethod
    def of(running: RunningSample, sample: str, lease: int) -> Owner:
        """Return the owner of the tasks of a leased sample."""
        return Owner(running, f"{lease} {sample}".encode())


OWNER: ContextVar[Owner | None] = ContextVar("owner of tasks", default=None)


class _SampleSteps(Coroutine[Any, Any, Any]):
    """A coroutine of a task of a sample."""

    __slots__ = ("_coroutine", "_name", "_running")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], owner: Owner) -> None:
        self._coroutine = coroutine
        self._running, self._name = owner

    def send(self, value: Any) -> Any:
        """Run until the next suspension."""
        before = self._running.replace(self._name)
        try:
            return self._coroutine.send(value)
        except (SystemExit, KeyboardInterrupt) as error:
            raise _ended(error) from error
        finally:
            self._running.replace(before)

    def throw(self, *error: Any) -> Any:
        """Raise an error at the suspension, and run until the next one."""
        before = self._running.replace(self._name)
        try:
            return self._coroutine.throw(*error)
        except (SystemExit, KeyboardInterrupt) as raised:
            raise _ended(raised) from raised
        finally:
            self._running.replace(before)

    def close(self) -> None:
        """End the coroutine."""
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()

    def __getattr__(self, name: str) -> Any:
        """Return the attributes of the coroutine that tasks show: its name, its frame."""
        return getattr(self._coroutine, name)


def _ended(error: BaseException) -> TrajectoryError:
    return TrajectoryError(f"a task of its loop raised {described_error(error)}")


def make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    """Make a task, as a task factory of an event loop: one that a task of a sample starts is of that sample too."""
    owner = OWNER.get()
    if owner is not None and asyncio.iscoroutine(coroutine):
        coroutine = _SampleSteps(coroutine, owner)
        if (context := options.get("context")) is not None:
            context.run(OWNER.set, owner)
    return asyncio.Task(coroutine, loop=loop, **options)


def start_for(owner: Owner, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start the first task of a sample. The tasks that it starts are of the sample if the running event loop makes
    tasks by :func:`make_task`."""
    context = copy_context()
    context.run(OWNER.set, owner)
    return asyncio.Task(_SampleSteps(coroutine, owner), context=context)
