"""Keeps one engine server running: starts it, lets its owner serve from it, and starts the next one when it ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from rljob.protocol.backoff import Backoff
from rljob.rollout.supervisor import EngineProcess, EngineStartError

log = logging.getLogger(__name__)

FAILED_STARTS = 3
FIRST_BACKOFF_SECONDS = 0.5
LAST_BACKOFF_SECONDS = 30.0
BACKOFF_RESET_SECONDS = 60.0  # the back-off is reset after a server that lived longer
FLUSH_SECONDS = 0.3  # time to send the last report before the process exits

Report = Callable[[str, str, bool, bool], None]
"""Called when a server has ended: reason, last lines of its log, whether it was still starting, whether it is final."""


class EngineRestarts:
    """The servers of one engine, one after the other.

    Args:
        start: starts a server.
        serve: serves from a healthy server until it ends or is replaced; returns the reason, or raises
            EngineStartError if the server counts as not started.
        report: see :data:`Report`.
    """

    def __init__(
        self,
        start: Callable[[], Awaitable[EngineProcess]],
        serve: Callable[[EngineProcess], Awaitable[str]],
        report: Report,
    ) -> None:
        self.engine: EngineProcess | None = None
        """The present server; None between two servers."""
        self._start = start
        self._serve = serve
        self._report = report

    async def run(self) -> None:
        """Start and serve until cancelled. The owner calls :meth:`stop` afterwards.

        Raises:
            EngineStartError: the server failed to start, or was killed before it served, FAILED_STARTS times in a row,
                or cannot start.
        """
        failures, kills, backoff = 0, 0, Backoff(FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS)
        while True:
            began = time.monotonic()
            engine = self.engine = await self._start()
            try:
                await engine.wait_healthy()
                log.info("engine healthy after %.1f s", time.monotonic() - began)
                reason = await self._serve(engine)
                failures = kills = 0
                self._report(reason, engine.last_lines(), False, False)
            except EngineStartError as error:
                failures, kills = failures + (not error.killed), kills + error.killed
                reason, final = str(error), error.permanent or failures == FAILED_STARTS
                self._report(reason, error.last_lines, True, final)
                if final or kills == FAILED_STARTS:
                    await asyncio.sleep(FLUSH_SECONDS)
                    raise
            log.warning("%s; restarting it", reason)
            await engine.kill()
            self.engine = None
            if time.monotonic() - began > BACKOFF_RESET_SECONDS:
                backoff.reset()
            await backoff.wait()

    async def stop(self) -> None:
        """End the present server."""
        if self.engine is not None:
            await self.engine.stop()
