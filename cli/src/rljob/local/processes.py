"""Starts and ends the processes of a run. Each process leads a session, dies with ``rljob run``, and has a mark."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rljob.local import process_cleanup
from rljob.local.log_pipe import HEADER, LogPipe
from rljob.local.outage import full_disk_message
from rljob.protocol.child_signals import signal_child
from rljob.protocol.environment import LOG_LEVEL, SGLANG_PYTHON, search_path
from rljob.protocol.gpus import ORDER, PCI_ORDER
from rljob.protocol.health_probe import HEARTBEAT
from rljob.protocol.model_cache import MODEL_CACHE
from rljob.protocol.parent_death import set_parent_death_signal

GRACE_SECONDS = 10.0
MAX_LOG_LINES = 200
LINE_CHARACTERS = 2000
_ERROR = re.compile(r"\s*\S+ \S+ (?:ERROR|CRITICAL) (?:rank \d+ )?(?:root|rljob[\w.]*): (.+)")
"""A line of a component's log: time, level, for the trainer its rank, logger, message. The launcher's lines, which only
repeat an exit code, have another logger."""


@dataclass(frozen=True)
class ProcessCommand:
    """A process to start: a component, or the initializer."""

    name: str
    """Name of the component, and of its log."""
    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    """Variables added to those of ``rljob run``."""


class Interrupt:
    """Handler of termination signals: the first sets ``stop``, the second ``kill``."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.kill = asyncio.Event()

    def __call__(self) -> None:
        """Handle a signal."""
        (self.kill if self.stop.is_set() else self.stop).set()


def log_path(directory: Path, name: str) -> Path:
    """Return the log of component ``name`` of the run in ``directory``."""
    return directory / "logs" / f"{name}.log"


def heartbeat_path(directory: Path, name: str) -> Path:
    """Return the heartbeat file of component ``name`` of the run in ``directory``."""
    return directory / "heartbeats" / name


def tail(path: Path, lines: int = 15) -> str:
    """Return the path of a log and the last lines that its newest process wrote, without the ends of very long ones."""
    try:
        text = path.read_bytes()[-65536:].decode(errors="replace")
    except OSError:
        return str(path)
    newest = text.rpartition(HEADER)[2].splitlines()[1 if HEADER in text else 0 :]
    shown = (line if len(line) <= LINE_CHARACTERS else f"{line[:LINE_CHARACTERS]} …" for line in newest[-lines:])
    return "\n".join([f"{path}:", *(f"  {line}" for line in shown)])


def last_line(path: Path) -> str:
    """Return the last line that the newest process wrote to a log; empty if there is none."""
    lines = tail(path, 1).splitlines()[1:]
    return lines[0].strip() if lines else ""


def last_error(path: Path) -> str:
    """Return the last error that the newest process logged, without time and logger; empty if there is none."""
    errors = [match[1] for line in tail(path, MAX_LOG_LINES).splitlines() if (match := _ERROR.match(line))]
    return errors[-1] if errors else ""


class ComponentProcess:
    """A process of the run, and the pipe of its output."""

    def __init__(self, process: asyncio.subprocess.Process, output: LogPipe) -> None:
        self._process, self._output = process, output
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code; None while the process runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Return the exit code once the process has ended."""
        return await self._process.wait()

    def close_log(self) -> None:
        """Write the rest of the output to the log and close it, if it is open. The process must have ended."""
        self._output.close()

    def terminate(self) -> None:
        """Send SIGTERM to the process if it runs."""
        signal_child(self._process, signal.SIGTERM)

    def kill_group(self) -> None:
        """Kill the process and its descendants that are still in its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


async def start(command: ProcessCommand, directory: Path, note: str = "") -> ComponentProcess:
    """Start ``command`` for the run in ``directory``; its output goes to its log.

    Raises:
        OSError: the program cannot be started.
    """
    output = LogPipe(log_path(directory, command.name), note)
    try:
        process = await asyncio.create_subprocess_exec(
            *command.arguments,
            stdin=subprocess.DEVNULL,
            stdout=output.writing,
            stderr=output.writing,
            env={
                **environment_of(command),
                HEARTBEAT: str(heartbeat_path(directory, command.name)),
                process_cleanup.MARK: mark(directory, command.name),
            },
            start_new_session=True,
            preexec_fn=set_parent_death_signal,
        )
    except (OSError, subprocess.SubprocessError) as error:
        output.close_writing()
        output.close()
        if isinstance(error, OSError):
            raise
        raise OSError(f"the system refuses PR_SET_PDEATHSIG: {error}") from error
    output.close_writing()
    return ComponentProcess(process, output)


def environment_of(command: ProcessCommand) -> dict[str, str]:
    """Return the environment of ``command``, without the variables of a single start (heartbeat, mark)."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RLJOB_")}
    users = (LOG_LEVEL, MODEL_CACHE, SGLANG_PYTHON)
    inherited |= {name: os.environ[name] for name in users if name in os.environ}
    return {
        "OMP_NUM_THREADS": "1",  # the components share the cores; more threads make all of them slower
        ORDER: PCI_ORDER,  # GPUs have the numbers of nvidia-smi, from which rljob assigns them
        "PYTHONUNBUFFERED": "1",
        **inherited,
        "PATH": search_path(),
        **command.environment,
    }


def mark(directory: Path, name: str = "") -> str:
    """Return the mark of a component's processes; without a name the prefix of all marks of the run."""
    return f"{directory}:{name}:" if name else f"{directory}:"


async def end(process: ComponentProcess, kill: asyncio.Event, grace: float = GRACE_SECONDS) -> None:
    """Send SIGTERM to ``process``; kill its group after ``grace`` seconds or once ``kill`` is set. Closes its log."""
    process.terminate()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace):
            await first(process.wait(), kill.wait())
    process.kill_group()
    await process.wait()
    process.close_log()


def describe_exit(code: int) -> str:
    """Return how a process ended, as text."""
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"


def describe_restart(event: Mapping[str, Any]) -> str:
    """Return a ``restarting`` event of events.jsonl as text: exit ``code``; ``still``: seconds without progress, if
    it was killed for hanging; ``full``: directory whose disk was full; ``cause``: its last line of output."""
    still, full, cause = event.get("still"), event.get("full"), event.get("cause")
    how = describe_exit(event["code"]) if still is None else f"made no progress for {still:g} s"
    why = full_disk_message(full) if full else cause
    return f"{how} ({why})" if why else how


async def first(*awaitables: object) -> None:
    """Return when the first of several awaitables is done; the others are cancelled."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]  # type: ignore[call-overload]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def reaper(directory: Path) -> Iterator[None]:
    """Run the reaper while entered: it kills the processes of the run when this process ends, even by SIGKILL."""
    process_cleanup.kill_marked(mark(directory))  # left by a run that was killed together with its reaper
    reaper_process = subprocess.Popen(
        [sys.executable, "-I", "-S", process_cleanup.__file__, mark(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=_without_marks(os.environ),
    )
    try:
        yield
    finally:
        process_cleanup.kill_marked(mark(directory))
        assert reaper_process.stdin is not None
        reaper_process.stdin.close()
        reaper_process.wait()


def _without_marks(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name != process_cleanup.MARK}
