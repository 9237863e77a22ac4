"""The run's durable state: ledger (SQLite) and payload (segments), committed in groups.

The event loop queues statements and records, and one thread commits them: payload first, fsynced, then the ledger's
transaction. While one commit runs the next one collects, so commits are as large as the load makes them and as quick
as the disk allows. Effects on the outside (messages, acknowledgements) are given to :meth:`Store.then`, and happen
after the commit of everything queued before them.

This module knows no table: the writes are in :mod:`rljob.ledger.writer`, the queries in :mod:`rljob.ledger.queries`.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from rljob.ledger.segments import Location, Segments

log = logging.getLogger(__name__)

LEDGER, PAYLOAD = "ledger.sqlite", "payload"
"""The ledger's file and the payload's directory in the job's storage."""
LOCK = "ledger.lock"
"""Held by the coordinator that works there. A file of its own: to close one of the ledger would drop SQLite's locks."""

CHECKPOINT_COMMITS = 512

SCHEMA = files(__package__).joinpath("schema.sql").read_text()
SCHEMA_VERSION = 4
"""Of schema.sql; kept in the ledger as user_version."""

Effect = Callable[[], None]
_Row = Sequence[Any]


class _Statement(NamedTuple):
    """A queued statement. ``rows`` is how many rows it must change; None: any number."""

    sql: str
    values: _Row
    rows: int | None = None


class StorageInUseError(Exception):
    """Another coordinator works in the storage; it may end, or be about to."""


class TransitionError(Exception):
    """A statement did not change the row it is about: the row is missing, or its state does not allow the change. The
    transaction is rolled back, and the coordinator ends."""


class Store:
    """One run's ledger and payload in ``directory``, which no other process may write to meanwhile. Readers may read.

    Raises:
        StorageInUseError: another one does.
        ValueError: the ledger is of another version of rljob.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = _locked(directory)
        try:
            self._open()
        except BaseException:  # the next attempt, here or elsewhere, must not find it locked
            self.unlock()
            raise

    def _open(self) -> None:
        directory = self.directory
        self._path = directory / LEDGER
        self.db = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
        self.db.execute("PRAGMA journal_mode=WAL")
        self.db.execute("PRAGMA synchronous=FULL")
        self.db.execute("PRAGMA wal_autocheckpoint=0")
        self._create_tables()
        self.segments = Segments(directory / PAYLOAD)
        self._reader = sqlite3.connect(self._path, check_same_thread=False)
        self._reader.row_factory = sqlite3.Row
        self._statements: list[_Statement] = []
        self._payloads: list[tuple[bytes, Callable[[Location], tuple[str, _Row]]]] = []
        self._effects: list[Effect] = []
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._commits = 0

    def _create_tables(self) -> None:
        """Create the tables that do not exist yet, all in one transaction: a reader sees none or all of them."""
        check_version(self._path, self.db.execute("PRAGMA user_version").fetchone()[0])
        self.db.executescript(f"BEGIN IMMEDIATE; PRAGMA user_version={SCHEMA_VERSION}; {SCHEMA} COMMIT;")

    # --- called by the event loop ---

    def execute(self, statement: str, *row: Any) -> None:
        """Queue a statement."""
        self._statements.append(_Statement(statement, row))
        self._wake.set()

    def execute_one(self, statement: str, *row: Any) -> None:
        """Queue a statement that must change exactly one row; otherwise the commit fails with TransitionError."""
        self._statements.append(_Statement(statement, row, rows=1))
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

    async def run(self) -> None:
        """Commit until cancelled. An error of the disk, or a statement that is refused, ends it and the coordinator."""
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
        self.unlock()

    def unlock(self) -> None:
        """Let another coordinator in, as the system does when this process dies."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # --- in the store's thread ---

    def _commit(
        self,
        statements: list[_Statement],
        payloads: list[tuple[bytes, Callable[[Location], tuple[str, _Row]]]],
    ) -> None:
        rows = [_Statement(*statement(self.segments.append(payload))) for payload, statement in payloads]
        self.segments.sync()
        self.db.execute("BEGIN IMMEDIATE")
        try:
            for sql, values, expected in [*statements, *rows]:
                changed = self.db.execute(sql, values).rowcount
                if expected is not None and changed != expected:
                    raise TransitionError(f"{sql} changed {changed} rows instead of {expected}, for {values}")
            self.db.execute("COMMIT")
        except (sqlite3.Error, TransitionError):
            self.db.execute("ROLLBACK")
            raise
        self._commits += 1
        if self._commits % CHECKPOINT_COMMITS == 0:
            self.db.execute("PRAGMA wal_checkpoint(PASSIVE)")


def _locked(directory: Path) -> int | None:
    """Lock the storage; return the lock's descriptor, or None where the file system has no locks.

    Raises:
        StorageInUseError: it is locked.
    """
    lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise StorageInUseError(
            f"{directory} is in use by another coordinator; wait until its run has ended, or give this job storage of "
            "its own"
        ) from None
    except OSError as error:
        log.warning("%s: %s; nothing keeps a second coordinator out", directory / LOCK, error.strerror)
        os.close(lock)
        return None
    return lock


def check_version(path: Path, version: int) -> None:
    """Check that a ledger whose user_version is ``version`` has this schema; 0 is a new one.

    Raises:
        ValueError: it was written by another version of rljob.
    """
    if version not in (0, SCHEMA_VERSION):
        raise ValueError(
            f"{path} was written by another version of rljob (ledger {version}, this one reads {SCHEMA_VERSION});"
            " use that version or choose another run directory"
        )


def now() -> float:
    """Return Unix time, as the ledger keeps it."""
    return time.time()
