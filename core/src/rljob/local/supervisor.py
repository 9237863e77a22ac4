"""Keeps one part running: restarts it with back-off whenever it dies, until the run stops or gives up on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rljob.local import processes, sweep
from rljob.local.errors import RunError
from rljob.local.processes import Command, Interrupt

CONFIGURATION_ERROR = 2


@dataclass(frozen=True)
class Backoff:
    """Seconds to wait before a restart: doubled with every death that comes quickly."""

    first: float = 0.2
    last: float = 30.0
    long_life: float = 10.0
    """A process that lived so long did not die quickly: the next wait is ``first`` again."""
    forgiving_life: float = 600.0
    """Every so many seconds of life one earlier restart is forgiven."""
    after_success: float = 2.0
    """Shortest wait after exit code 0: the run may just have ended, and the status says so in a moment."""

    def next(self, previous: float, lived: float) -> float:
        """Return the wait after a process that ``lived`` so long, the ``previous`` wait being 0 at the first death."""
        if previous == 0 or lived >= self.long_life:
            return self.first
        return min(2 * previous, self.last)


class Supervisor:
    """One part.

    Args:
        command: how it is started.
        directory: the run directory.
        max_restarts: more than these are a failure of the run.
        tell: called with every event of the part: its name, what happened, and figures of it.
    """

    def __init__(
        self,
        command: Command,
        directory: Path,
        max_restarts: int,
        tell: Callable[..., None],
        backoff: Backoff | None = None,
    ) -> None:
        self.name = command.name
        self.state = "waiting"  # waiting | running | restarting | stopped
        self.restarts = 0
        self._charged = 0  # restarts that no long life has forgiven
        self._command = command
        self._directory = directory
        self._max_restarts = max_restarts
        self._tell = tell
        self._backoff = backoff or Backoff()

    async def run(self, interrupt: Interrupt) -> None:
        """Keep the part running until ``interrupt.stop``; nothing of it is left then.

        Raises:
            RunError: it exited with 2 (configuration), or died more often than is allowed.
        """
        wait = 0.0
        while not interrupt.stop.is_set():
            born = time.monotonic()
            code = await self._live(interrupt)
            if code is None:
                break
            lived = time.monotonic() - born
            self._charge(code, lived)
            self.state = "restarting"
            wait = self._backoff.next(wait, lived)
            pause = max(wait, self._backoff.after_success) if code == 0 else wait
            await processes.first(asyncio.sleep(pause), interrupt.stop.wait())
        self.state = "stopped"

    async def _live(self, interrupt: Interrupt) -> int | None:
        """Start a process and see it to its end; return its exit code, or None when the run stopped it."""
        note = f"(restart {self.restarts})" if self.restarts else ""
        try:
            process = await processes.start(self._command, self._directory, note)
        except OSError as error:
            wrong = isinstance(error, FileNotFoundError | PermissionError)  # else the machine's trouble: a full disk
            code = CONFIGURATION_ERROR if wrong else 1
            raise RunError(f"{self.name} cannot be started: {error}", exit_code=code) from None
        self.state = "running"
        self._tell(self.name, "started", pid=process.pid, restarts=self.restarts)
        await processes.first(process.wait(), interrupt.stop.wait())
        if process.returncode is None:
            await processes.end(process, interrupt.kill)
        else:
            processes.kill_group(process)
        sweep.sweep(processes.mark(self._directory, self.name))
        self._tell(self.name, "exited", pid=process.pid, code=process.returncode)
        return None if interrupt.stop.is_set() else process.returncode

    def _charge(self, code: int, lived: float) -> None:
        """Count a death, unless it ends the run."""
        path = processes.log_path(self._directory, self.name)
        if code == CONFIGURATION_ERROR:
            raise RunError(f"{self.name} refuses its configuration; see the end of its log", 2, processes.tail(path))
        self._charged = max(0, self._charged - int(lived / self._backoff.forgiving_life)) + 1
        if self._charged > self._max_restarts:
            how = processes.describe_exit(code)
            raise RunError(
                f"{self.name} {how} and had its {self._max_restarts} restarts (spec.failurePolicy.maxRestarts)",
                log=processes.tail(path),
            )
        self.restarts += 1
        self._tell(self.name, "restarting", code=code)
