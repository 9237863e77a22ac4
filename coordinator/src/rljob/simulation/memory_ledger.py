"""The ledger of a simulated run, in memory.

Nothing that it has outlives the process, so a statement is executed when a query may read its rows, together with many
others. Effects run in the iteration of the event loop in which those of a ledger on disk run at the earliest.

In one way it differs from :class:`rljob.ledger.store.Store`: a statement that is rejected is noticed only when it is
executed, at the latest when the ledger is closed. Effects of its commit, and of commits after it, have run by then. To
execute the statements of each commit before its effects would take the time that this class saves. A rejected statement
is a defect, and always ends a simulation with an error.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from typing import Any

from rljob.ledger.writer import LedgerWriter

MOST_WAITING = 4096
"""Statements and records that wait at most: they hold memory."""


class MemoryLedger(LedgerWriter):
    """A :class:`LedgerWriter` in memory, whose commits and effects need no task."""

    def __init__(self) -> None:
        super().__init__(None)
        self._call_soon: Callable[[Callable[[], None]], object] | None = None  # of the loop, from :meth:`run` on
        self._failed: asyncio.Future[None]
        self._due = False
        self._waiting: list[Any] = []  # committed, as far as queries see, and not executed

    def wake(self) -> None:
        """Call ``before_commit`` in the next iteration of the event loop, and commit what is queued then."""
        self._woken = True
        if not self._due:
            self._schedule()

    def query(self, statement: str, *row: Any) -> list[sqlite3.Row]:
        """Return committed rows."""
        self._execute()
        return super().query(statement, *row)

    def close(self) -> None:
        """Execute what waits, and close the ledger. Raises the error of a rejected statement."""
        try:
            self._execute()
        finally:
            super().close()

    async def run(self, interval: float = 0.0) -> None:
        """Commit until cancelled, in the next iteration of the event loop. An effect that raises ends this task and the
        simulation, and so does a rejected statement that no query executes."""
        loop = asyncio.get_running_loop()
        self._failed, self._call_soon, self._due = loop.create_future(), loop.call_soon, True
        self._commit_queued()
        await self._failed

    def _schedule(self) -> None:
        if self._call_soon is not None:
            self._due = True
            self._call_soon(self._commit_queued)

    def _commit_queued(self) -> None:
        try:
            while self._woken:
                self._woken = False
                self.before_commit()
                self._waiting += self._queue
                self._queue.clear()
                effects, self._effects = self._effects, []
                joined, self._joined = self._joined, {}
                for effect, values in effects:
                    effect(*values)
                for join, items in joined.items():
                    join(items)
            self._due = False
            if len(self._waiting) >= MOST_WAITING:
                self._execute()
        except Exception as error:  # noqa: BLE001 it ends the task of :meth:`run`
            self._failed.set_exception(error)

    def _execute(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._commit(waiting)
