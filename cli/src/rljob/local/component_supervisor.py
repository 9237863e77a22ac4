"""Keeps one component running: restarts it with back-off when it exits, until the run stops or its restarts are used.

A component that hangs is killed, with everything it started, and restarted like one that exited.
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
from rljob.local import process_cleanup, processes, watchdog
from rljob.local.errors import CliError
from rljob.local.processes import Interrupt, ProcessCommand
from rljob.protocol.exit_codes import CONFIGURATION_ERROR

LITTLE_SPACE_BYTES = 1 << 20
"""Less free space than this explains an exit."""


@dataclass(frozen=True)
class RestartBackoff:
    """Seconds to wait before a restart: doubled with every quick exit."""

    first: float = 0.2
    last: float = 30.0
    long_life: float = 10.0
    """An exit after so long is not quick: the next wait is ``first`` again."""
    forgiving_life: float = 600.0
    """One earlier restart is forgiven per so many seconds of life."""
    after_success: float = 2.0
    """Shortest wait after exit code 0: the run may just have ended, and the next status shows it."""

    def next(self, previous: float, lived: float) -> float:
        """Return the wait after a process that ``lived`` so long; ``previous``: the last wait, 0 at the first exit."""
        if previous == 0 or lived >= self.long_life:
            return self.first
        return min(2 * previous, self.last)


@dataclass(frozen=True)
class End:
    """How a process ended: its exit code; ``still``: seconds without a move if it was killed for hanging."""

    code: int
    still: float | None = None


class Supervisor:
    """Runs one component.

    Args:
        command: of its process.
        directory: the run directory.
        policy: its number of restarts, and after how long without a move it is killed.
        tell: called with every event: component, event, and its values.
    """

    def __init__(
        self,
        command: ProcessCommand,
        directory: Path,
        policy: FailurePolicy,
        tell: Callable[..., None],
        backoff: RestartBackoff | None = None,
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
        self._backoff = backoff or RestartBackoff()

    async def run(self, interrupt: Interrupt) -> None:
        """Keep the component running until ``interrupt.stop``; no process of it is left then.

        Raises:
            CliError: it exited with 2 (configuration), or used all its restarts.
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
        """Start a process and wait for its end; return how it ended, or None if the run stopped it."""
        note = f"(restart {self.restarts})" if self.restarts else ""
        try:
            watchdog.reset(self._heartbeat)
            process = await processes.start(self._command, self._directory, note)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                return End(1)  # as if it had exited: there may be space later
            wrong = isinstance(error, FileNotFoundError | PermissionError)  # else an error of the machine
            code = CONFIGURATION_ERROR if wrong else 1
            raise CliError(f"{self.name} cannot be started: {error}", exit_code=code) from None
        self.state = "running"
        self._tell(self.name, "started", pid=process.pid, restarts=self.restarts)
        mark = processes.mark(self._directory, self.name)
        patience = self._policy.hang_seconds
        hanging = asyncio.create_task(watchdog.wait_until_hung(self._heartbeat, mark, patience))
        await processes.first(process.wait(), interrupt.stop.wait(), asyncio.wait([hanging]))
        hung = hanging.done() and process.returncode is None and not interrupt.stop.is_set()
        hanging.cancel()
        if process.returncode is None and not hung:
            await processes.end(process, interrupt.kill)
        process_cleanup.kill_marked(mark)  # first: some are known by their parents alone
        process.kill_group()
        code = await process.wait()
        process.close_log()
        self._tell(self.name, "exited", pid=process.pid, code=code)
        return None if interrupt.stop.is_set() else End(code, patience if hung else None)

    def _charge(self, end: End, lived: float) -> None:
        """Count an exit against the restarts, or raise. An exit on a full disk is not charged."""
        log = processes.log_path(self._directory, self.name)
        if end.code == CONFIGURATION_ERROR:
            raise CliError(f"{self.name} refuses its configuration; see the end of its log", 2, processes.tail(log))
        self._charged = max(0, self._charged - int(lived / self._backoff.forgiving_life))
        figures: dict[str, object] = {"code": end.code}
        if end.still is not None:
            figures["still"] = end.still
        if shutil.disk_usage(self._directory).free < LITTLE_SPACE_BYTES:
            figures["full"] = str(self._directory)  # not charged: it lasts until a user frees space
        else:
            self._charged += 1
        if self._charged > self._policy.max_restarts:
            raise CliError(
                f"{self.name} {processes.describe_restart(figures)} and had its {self._policy.max_restarts} restarts "
                "(spec.failurePolicy.maxRestarts)",
                log=processes.tail(log),
            )
        self.restarts += 1
        self._tell(self.name, "restarting", **figures)
