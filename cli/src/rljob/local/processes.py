"""Starts and ends processes of parts. Each leads a session of its own, dies with ``rljob run`` and carries a mark."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from rljob.local import sweep
from rljob.protocol.environment import LOG_LEVEL, search_path
from rljob.protocol.health_probe import HEARTBEAT
from rljob.protocol.parent_death import set_parent_death_signal

GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Command:
    """A process to start: a part, or the initializer."""

    name: str
    """Name of the part, and of its log."""
    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    """Variables besides those of ``rljob run`` itself."""


class Interrupt:
    """What the person at the terminal wants: ``stop`` once asked to end, ``kill`` when asked again."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.kill = asyncio.Event()

    def __call__(self) -> None:
        """Take a signal."""
        (self.kill if self.stop.is_set() else self.stop).set()


def log_path(directory: Path, name: str) -> Path:
    """Return the log of part ``name`` of the run in ``directory``."""
    return directory / "logs" / f"{name}.log"


def heartbeat_path(directory: Path, name: str) -> Path:
    """Return the file that part ``name`` of the run in ``directory`` touches while it moves."""
    return directory / "heartbeats" / name


def tail(path: Path, lines: int = 15) -> str:
    """Return the path of a log and the last lines of what its newest process wrote."""
    try:
        text = path.read_bytes()[-65536:].decode(errors="replace")
    except OSError:
        return str(path)
    newest = text.rpartition(_HEADER)[2].splitlines()[1 if _HEADER in text else 0 :]
    return "\n".join([f"{path}:", *(f"  {line}" for line in newest[-lines:])])


def last_line(path: Path) -> str:
    """Return the last line of a log that says something, or an empty text."""
    lines = tail(path, 1).splitlines()[1:]
    return lines[0].strip() if lines else ""


_HEADER = "--- started "


async def start(command: Command, directory: Path, note: str = "") -> asyncio.subprocess.Process:
    """Start ``command`` for the run in ``directory``; what it writes is appended to its log.

    Raises:
        OSError: the program cannot be started.
    """
    path = log_path(directory, command.name)
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as log:
        log.write(f"{_HEADER}{datetime.now().astimezone().isoformat(timespec='seconds')} {note}\n".encode())
        log.flush()
        return await asyncio.create_subprocess_exec(
            *command.arguments,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_environment(command, directory),
            start_new_session=True,
            preexec_fn=set_parent_death_signal,
        )


def _environment(command: Command, directory: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RLJOB_")}
    if LOG_LEVEL in os.environ:
        inherited[LOG_LEVEL] = os.environ[LOG_LEVEL]
    return {
        "OMP_NUM_THREADS": "1",  # several parts share the cores; more threads each make all of them slower
        "PYTHONUNBUFFERED": "1",
        **inherited,
        "PATH": search_path(),
        **command.environment,
        HEARTBEAT: str(heartbeat_path(directory, command.name)),
        sweep.MARK: mark(directory, command.name),
    }


def mark(directory: Path, name: str = "") -> str:
    """Return the mark of a part's processes; with no name the beginning of all marks of the run."""
    return f"{directory}:{name}:" if name else f"{directory}:"


async def end(process: asyncio.subprocess.Process, kill: asyncio.Event, grace: float = GRACE_SECONDS) -> None:
    """Ask ``process`` to end, and kill its group after ``grace`` seconds or once ``kill`` is set."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace):
            await first(process.wait(), kill.wait())
    kill_group(process)
    await process.wait()


def kill_group(process: asyncio.subprocess.Process) -> None:
    """Kill the process and whatever it started that is still in its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def describe_exit(code: int) -> str:
    """Return how a process ended, in words."""
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"


def describe_death(event: Mapping[str, Any]) -> str:
    """Return what a ``restarting`` event of events.jsonl says, in words: its ``code``; ``still``: seconds without a
    move it was killed for; ``full``: directory whose disk had no room; ``cause``: what it said last."""
    still, full, cause = event.get("still"), event.get("full"), event.get("cause")
    how = describe_exit(event["code"]) if still is None else f"has not moved for {still:g} s"
    why = f"the disk of {full} is full: make room there" if full else cause
    return f"{how} ({why})" if why else how


async def first(*awaitables: object) -> None:
    """Return when the first of some coroutines has ended; the others are cancelled."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]  # type: ignore[call-overload]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def guardian(directory: Path) -> Iterator[None]:
    """While inside, a process watches that nothing of the run outlives this one, even when it is killed."""
    sweep.sweep(mark(directory))  # leftovers of a run that died together with its guardian
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", sweep.__file__, mark(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=_without_marks(os.environ),
    )
    try:
        yield
    finally:
        sweep.sweep(mark(directory))
        assert watcher.stdin is not None
        watcher.stdin.close()
        watcher.wait()


def _without_marks(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name != sweep.MARK}
