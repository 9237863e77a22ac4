"""Keeps one component running: restarts it with back-off when it exits, until the run stops or no restart is left.

A component that hangs is killed with all processes that it started, and restarted like a component that exited.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rljob.api.run_policy import FailurePolicy
from rljob.local import process_cleanup, processes, watchdog
from rljob.local.errors import CliError
from rljob.local.outage import is_full
from rljob.local.processes import Interrupt, ProcessCommand
from rljob.protocol.exit_codes import CONFIGURATION_ERROR


@dataclass(frozen=True)
class RestartBackoff:
    """Seconds to wait before a restart: doubled with every quick exit."""

    first: float = 0.2
    last: float = 30.0
    stable_seconds: float = 10.0
    """A process that ran for this long did not exit quickly: the next wait is ``first`` again."""
    forgiveness_seconds: float = 600.0
    """One earlier restart is forgiven for each such period that a process ran."""
    after_success: float = 2.0
    """Shortest wait after exit code 0: the run may just have ended, and the next status shows it."""

    def next(self, previous: float, lived: float) -> float:
        """Return the wait after a process that ran for ``lived`` seconds. ``previous``: the last wait; at first 0."""
        if previous == 0 or lived >= self.stable_seconds:
            return self.first
        return min(2 * previous, self.last)


@dataclass(frozen=True)
class End:
    """How a process ended. ``code``: exit code; ``still``: seconds without progress, if it was killed for hanging."""

    code: int
    still: float | None = None


class Supervisor:
    """Runs one component.

    Args:
        command: of its process.
        directory: the run directory.
        policy: number of restarts, and seconds without progress after which the component is killed.
        record_event: called with every event: component, event, and its values.
        backoff: waits between restarts.
    """

    def __init__(
        self,
        command: ProcessCommand,
        directory: Path,
        policy: FailurePolicy,
        record_event: Callable[..., None],
        backoff: RestartBackoff | None = None,
    ) -> None:
        self.name = command.name
        self.state = "waiting"  # waiting | running | restarting | stopped
        self.restarts = 0
        self._charged = 0  # restarts that are not forgiven
        self._command = command
        self._directory = directory
        self._heartbeat = processes.heartbeat_path(directory, command.name)
        self._policy = policy
        self._record_event = record_event
        self._backoff = backoff or RestartBackoff()

    async def run(self, interrupt: Interrupt) -> None:
        """Keep the component running until ``interrupt.stop`` is set; on return no process of it is left.

        Raises:
            CliError: the component exited with code 2 (configuration), or no restart is left.
        """
        wait = 0.0
        while not interrupt.stop.is_set():
            started = time.monotonic()
            end = await self._run_once(interrupt)
            if end is None:
                break
            lived = time.monotonic() - started
            self._charge(end, lived)
            self.state = "restarting"
            wait = self._backoff.next(wait, lived)
            pause = max(wait, self._backoff.after_success) if end.code == 0 else wait
            await processes.first(asyncio.sleep(pause), interrupt.stop.wait())
        self.state = "stopped"

    async def _run_once(self, interrupt: Interrupt) -> End | None:
        """Start a process and wait for its end; return how it ended, or None if the run stopped it."""
        note = f"(restart {self.restarts})" if self.restarts else ""
        try:
            watchdog.reset(self._heartbeat)
            process = await processes.start(self._command, self._directory, note)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                return End(1)  # treated as an exit: there may be space later
            wrong_program = isinstance(error, FileNotFoundError | PermissionError)  # else a failure of the machine
            code = CONFIGURATION_ERROR if wrong_program else 1
            raise CliError(f"{self.name} cannot be started: {error}", exit_code=code) from None
        self.state = "running"
        self._record_event(self.name, "started", pid=process.pid, restarts=self.restarts)
        mark = processes.mark(self._directory, self.name)
        patience = self._policy.hang_seconds
        hanging = asyncio.create_task(watchdog.wait_until_hung(self._heartbeat, mark, patience))
        await processes.first(process.wait(), interrupt.stop.wait(), asyncio.wait([hanging]))
        hung = hanging.done() and process.returncode is None and not interrupt.stop.is_set()
        hanging.cancel()
        if process.returncode is None and not hung:
            await processes.end(process, interrupt.kill)
        process_cleanup.kill_marked(mark)  # before kill_group: some processes are found only through their parents
        process.kill_group()
        code = await process.wait()
        process.close_log()
        self._record_event(self.name, "exited", pid=process.pid, code=code)
        return None if interrupt.stop.is_set() else End(code, patience if hung else None)

    def _charge(self, end: End, lived: float) -> None:
        """Count an exit against the restarts; raise if none is left. An exit on a full disk is not counted."""
        log = processes.log_path(self._directory, self.name)
        if end.code == CONFIGURATION_ERROR:
            if reason := processes.last_error(log):
                raise CliError(f"{self.name}: {reason}", 2, str(log))
            raise CliError(f"{self.name} rejects its configuration; see the end of its log", 2, processes.tail(log))
        self._charged = max(0, self._charged - int(lived / self._backoff.forgiveness_seconds))
        details: dict[str, object] = {"code": end.code}
        if end.still is not None:
            details["still"] = end.still
        if is_full(self._directory):
            details["full"] = str(self._directory)  # not counted: the disk stays full until a user frees space
        else:
            self._charged += 1
        if self._charged > self._policy.max_restarts:
            raise CliError(
                f"{self.name} {processes.describe_restart(details)} and exceeded spec.failurePolicy.maxRestarts "
                f"({self._policy.max_restarts})",
                log=processes.tail(log),
            )
        self.restarts += 1
        self._record_event(self.name, "restarting", **details)
