"""Keeps one part running: restarts it with back-off whenever it dies, until the run stops or gives up on it.

A part that does not move for too long is killed, with everything it started, and restarted like one that died.
"""

from __future__ import annotations

import asyncio
import errno
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rljob.api.run_policy import FailurePolicy
from rljob.local import hangs, processes, sweep
from rljob.local.errors import RunError
from rljob.local.processes import Command, Interrupt
from rljob.protocol.exit_codes import CONFIGURATION_ERROR

LITTLE_SPACE_BYTES = 1 << 20
"""Less room than this on the disk explains a death."""


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


@dataclass(frozen=True)
class End:
    """How a process ended: its exit code, and how many seconds it had not moved when it was killed for that."""

    code: int
    still: float | None = None


class Supervisor:
    """One part.

    Args:
        command: how it is started.
        directory: the run directory.
        policy: how many restarts it has, and after how long without a move it is killed.
        tell: called with every event of the part: its name, what happened, and figures of it.
    """

    def __init__(
        self,
        command: Command,
        directory: Path,
        policy: FailurePolicy,
        tell: Callable[..., None],
        backoff: Backoff | None = None,
    ) -> None:
        self.name = command.name
        self.state = "waiting"  # waiting | running | restarting | stopped
        self.restarts = 0
        self._charged = 0  # restarts that no long life has forgiven
        self._command = command
        self._directory = directory
        self._heartbeat = processes.heartbeat_path(directory, command.name)
        self._policy = policy
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
            end = await self._live(interrupt)
            if end is None:
                break
            lived = time.monotonic() - born
            self._charge(end, lived)
            self.state = "restarting"
            wait = self._backoff.next(wait, lived)
            pause = max(wait, self._backoff.after_success) if end.code == 0 else wait
            await processes.first(asyncio.sleep(pause), interrupt.stop.wait())
        self.state = "stopped"

    async def _live(self, interrupt: Interrupt) -> End | None:
        """Start a process and see it to its end; return how it ended, or None when the run stopped it."""
        note = f"(restart {self.restarts})" if self.restarts else ""
        try:
            hangs.reset(self._heartbeat)
            process = await processes.start(self._command, self._directory, note)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                return End(1)  # as if it had died of it: there may be room later
            wrong = isinstance(error, FileNotFoundError | PermissionError)  # else the machine's trouble
            code = CONFIGURATION_ERROR if wrong else 1
            raise RunError(f"{self.name} cannot be started: {error}", exit_code=code) from None
        self.state = "running"
        self._tell(self.name, "started", pid=process.pid, restarts=self.restarts)
        mark = processes.mark(self._directory, self.name)
        patience = self._policy.hang_seconds
        hanging = asyncio.create_task(hangs.hung(self._heartbeat, mark, patience))
        await processes.first(process.wait(), interrupt.stop.wait(), asyncio.wait([hanging]))
        hung = hanging.done() and process.returncode is None and not interrupt.stop.is_set()
        hanging.cancel()
        if process.returncode is None and not hung:
            await processes.end(process, interrupt.kill)
        sweep.sweep(mark)  # first: some are known by their parents alone
        processes.kill_group(process)
        code = await process.wait()
        self._tell(self.name, "exited", pid=process.pid, code=code)
        return None if interrupt.stop.is_set() else End(code, patience if hung else None)

    def _charge(self, end: End, lived: float) -> None:
        """Count a death, unless it ends the run. One on a full disk is not charged."""
        log = processes.log_path(self._directory, self.name)
        if end.code == CONFIGURATION_ERROR:
            raise RunError(f"{self.name} refuses its configuration; see the end of its log", 2, processes.tail(log))
        self._charged = max(0, self._charged - int(lived / self._backoff.forgiving_life))
        figures: dict[str, object] = {"code": end.code}
        if end.still is not None:
            figures["still"] = end.still
        if shutil.disk_usage(self._directory).free < LITTLE_SPACE_BYTES:
            figures["full"] = str(self._directory)  # somebody may make room, however long it takes: not charged
        else:
            self._charged += 1
        if self._charged > self._policy.max_restarts:
            raise RunError(
                f"{self.name} {processes.describe_death(figures)} and had its {self._policy.max_restarts} restarts "
                "(spec.failurePolicy.maxRestarts)",
                log=processes.tail(log),
            )
        self.restarts += 1
        self._tell(self.name, "restarting", **figures)
