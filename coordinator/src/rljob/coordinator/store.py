"""The run's durable state: ledger (SQLite) and payload (segments), committed in groups.

Statements and records are queued by the event loop and committed by one thread: payload first, fsynced, then the
ledger's transaction. While one commit runs the next one collects, so commits are as large as the load makes them and
as quick as the disk allows. Effects on the outside (messages, acknowledgements) are given to :meth:`Store.then`, and
happen after the commit of everything queued before them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any

import blake3

from rljob.coordinator.segments import Location, Segments

log = logging.getLogger(__name__)

CHECKPOINT_COMMITS = 512

Effect = Callable[[], None]
_Row = Sequence[Any]


class Store:
    """One run's ledger and payload in ``directory``.

    Raises:
        ValueError: the ledger is of another version of rljob.
    """

    SCHEMA_VERSION = 1

    def __init__(self, directory: Path) -> None:
        self._path = directory / "ledger.sqlite"
        self.db = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
        self.db.execute("PRAGMA journal_mode=WAL")
        self.db.execute("PRAGMA synchronous=FULL")
        self.db.execute("PRAGMA wal_autocheckpoint=0")
        version = self.db.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, self.SCHEMA_VERSION):
            raise ValueError(
                f"{directory / 'ledger.sqlite'} was written by another version of rljob (ledger {version}, this one "
                f"reads {self.SCHEMA_VERSION}); resume the run with that version or choose another run directory"
            )
        self.db.executescript(files(__package__).joinpath("schema.sql").read_text())
        self.db.execute(f"PRAGMA user_version={self.SCHEMA_VERSION}")
        self.segments = Segments(directory / "payload")
        self._reader = sqlite3.connect(self._path, check_same_thread=False)
        self._reader.row_factory = sqlite3.Row
        self._statements: list[tuple[str, _Row]] = []
        self._payloads: list[tuple[bytes, Callable[[Location], tuple[str, _Row]]]] = []
        self._effects: list[Effect] = []
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._commits = 0

    # --- called by the event loop ---

    def execute(self, statement: str, *row: Any) -> None:
        """Queue a statement."""
        self._statements.append((statement, row))
        self._wake.set()

    def record(self, payload: bytes, statement: Callable[[Location], tuple[str, _Row]]) -> None:
        """Queue a payload record and the statement that refers to where it will be."""
        self._payloads.append((payload, statement))
        self._wake.set()

    def then(self, effect: Effect) -> None:
        """Call ``effect`` once everything queued so far is durable."""
        self._effects.append(effect)
        self._wake.set()

    def query(self, statement: str, *row: Any) -> list[sqlite3.Row]:
        """Return committed rows. Short queries only: it runs in the event loop."""
        return self._reader.execute(statement, row).fetchall()

    def query_apart(self, statement: str, *row: Any) -> list[sqlite3.Row]:
        """Return committed rows over a connection of its own: for long queries, in a thread."""
        with contextlib.closing(sqlite3.connect(self._path)) as db:
            db.row_factory = sqlite3.Row
            return db.execute(statement, row).fetchall()

    async def run(self) -> None:
        """Commit for ever; ends only by an error of the disk, which ends the coordinator."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            self._wake.clear()
            statements, self._statements = self._statements, []
            payloads, self._payloads = self._payloads, []
            effects, self._effects = self._effects, []
            if statements or payloads:
                await loop.run_in_executor(self._thread, self._commit, statements, payloads)
            for effect in effects:
                effect()

    async def drain(self) -> None:
        """Wait until everything queued so far is durable and its effects have happened."""
        done = asyncio.Event()
        self.then(done.set)
        await done.wait()

    def close(self) -> None:
        """Commit nothing more; close the files."""
        self._thread.shutdown(wait=True)
        self.segments.close()
        self._reader.close()
        self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self.db.close()

    # --- in the store's thread ---

    def _commit(
        self,
        statements: list[tuple[str, _Row]],
        payloads: list[tuple[bytes, Callable[[Location], tuple[str, _Row]]]],
    ) -> None:
        rows = [statement(self.segments.append(payload)) for payload, statement in payloads]
        self.segments.sync()
        self.db.execute("BEGIN IMMEDIATE")
        try:
            for sql, values in [*statements, *rows]:
                self.db.execute(sql, values)
            self.db.execute("COMMIT")
        except sqlite3.Error:
            self.db.execute("ROLLBACK")
            raise
        self._commits += 1
        if self._commits % CHECKPOINT_COMMITS == 0:
            self.db.execute("PRAGMA wal_checkpoint(PASSIVE)")


def payload_digest(payload: bytes) -> str:
    """Return the digest the ledger keeps of a payload record."""
    return blake3.blake3(payload).hexdigest(16)


def now() -> float:
    """Return Unix time, as the ledger keeps it."""
    return time.time()
