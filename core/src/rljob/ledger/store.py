"""The run's durable state: ledger (SQLite) and payload (segments), with group commit.

The event loop queues statements and records; one thread commits them: first the payload with fsync, then the ledger's
transaction. Statements queued during a commit form the next commit, so the size of commits follows the load. Commits
begin at least ``interval`` seconds after each other, so that the events of a moderate load share them; the first one
after a pause does not wait. External effects (messages, acknowledgements) are passed to :meth:`Store.then` and run
after the commit of everything queued before them. The WAL is checkpointed by a thread of its own, by its length.

This module contains no SQL for particular tables: the writes are in :mod:`rljob.ledger.writer`, the queries in
:mod:`rljob.ledger.queries`.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rljob.ledger.record_store import RecordStore
from rljob.ledger.segments import MemorySegments, Segments
from rljob.ledger.wal_checkpoints import WalCheckpoints
from rljob.protocol.environment import LEDGER_DIRECTORY

log = logging.getLogger(__name__)

LEDGER, PAYLOAD, TEXTS = "ledger.sqlite", "payload", "texts"
"""The ledger's file, and the directories of the payload and of the responses' texts in the job's storage."""
LOCK = "ledger.lock"
"""Lock file in the storage and in the ledger's directory, held by the coordinator. Not the ledger file: closing a
descriptor of that would drop SQLite's locks."""

SCHEMA = files(__package__).joinpath("schema.sql").read_text()
SCHEMA_VERSION = 13
"""Version of schema.sql; stored in the ledger as user_version."""

PAGE_BYTES = 1024
"""Page size of the ledger. A commit writes whole pages to the WAL, and changes a few small rows in each."""

Effect = Callable[[], None]
_Row = Sequence[Any]


class _Statement(NamedTuple):
    """A queued statement. ``rows``: number of rows that it must change; None: any number. ``many``: the statement is
    executed for each of ``values``."""

    sql: str
    values: _Row
    rows: int | None = None
    many: bool = False


class _Each(msgspec.Struct, eq=False):
    """A queued row of a statement that is executed for many rows of a commit. ``rows`` as in :class:`_Statement`."""

    sql: str
    values: _Row
    rows: int | None = None


class _Record(msgspec.Struct, eq=False):
    """A queued record, and the row that stores its place: ``before``, segment, offset and length, ``after``. The row
    is executed as one of :class:`_Each`."""

    segments: RecordStore
    content: bytes
    digest: bytes | None
    sql: str
    before: _Row
    after: _Row = ()
    rows: int | None = None


_Queued = _Statement | _Each | _Record


def ledger_directory(storage: Path) -> Path:
    """Return the directory of the ledger: RLJOB_LEDGER, or the job's storage."""
    return Path(os.environ.get(LEDGER_DIRECTORY) or storage)


class StorageInUseError(Exception):
    """Another coordinator uses the storage. It may still end: the start can be retried."""


class TransitionError(Exception):
    """A statement did not change its row: the row is missing, or its state does not allow the change. The transaction
    is rolled back, and the coordinator exits."""


class Store:
    """One run's ledger and payload in ``directory``, the job's storage; RLJOB_LEDGER may name another directory for the
    ledger. One process writes at a time; readers are not restricted.

    With ``directory`` None both are in memory, and the event loop commits without a thread: for simulations.

    Raises:
        StorageInUseError: another process has the storage open for writing.
        ValueError: the ledger is of another version of rljob.
    """

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory or Path(":memory:")
        self._queue: list[_Queued] = []
        self._effects: list[tuple[Callable[..., object], tuple[Any, ...]]] = []  # with their arguments
        self._joined: dict[Callable[[list[Any]], None], list[Any]] = {}
        self._wake = asyncio.Event()
        self._woken = False
        """Whether ``_wake`` is set: what is queued is many times as frequent as commits."""
        self.before_commit: Effect = lambda: None
        """Called before each commit: what it queues is in the commit."""
        self._locks: list[int] = []
        try:
            # Both: a coordinator with another volume for its ledger must not write to the payload.
            for each in dict.fromkeys([directory, ledger_directory(directory)]) if directory is not None else ():
                self._locks += _acquire_lock(each)
            self._open(directory)
        except BaseException:  # a retry, by this or another process, must not find it locked
            self.unlock()
            raise

    def _open(self, directory: Path | None) -> None:
        self._path = self.directory if directory is None else ledger_directory(directory) / LEDGER
        self.db = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
        self.db.execute(f"PRAGMA page_size={PAGE_BYTES}")
        self.db.execute("PRAGMA journal_mode=WAL")
        self.db.execute("PRAGMA synchronous=FULL")
        self.db.execute("PRAGMA wal_autocheckpoint=0")
        self._create_tables()
        self.segments: RecordStore
        self.texts: RecordStore
        self._checkpoints: WalCheckpoints | None = None
        self._thread: Executor | None  # tests replace it by one without a thread
        if directory is None:
            self.segments, self.texts, self._reader, self._thread = MemorySegments(), MemorySegments(), self.db, None
        else:
            self.segments, self.texts = Segments(directory / PAYLOAD), Segments(directory / TEXTS)
            self._reader = sqlite3.connect(self._path, check_same_thread=False)
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
            self._checkpoints = WalCheckpoints(self._path, self.db)
        self._reader.row_factory = sqlite3.Row

    def _create_tables(self) -> None:
        """Create missing tables in one transaction: a reader sees none or all of them."""
        check_version(self._path, self.db.execute("PRAGMA user_version").fetchone()[0])
        self.db.executescript(f"BEGIN IMMEDIATE; PRAGMA user_version={SCHEMA_VERSION}; {SCHEMA} COMMIT;")

    # --- called by the event loop ---

    def execute(self, statement: str, *row: Any) -> None:
        """Queue a statement."""
        self._put(_Statement(statement, row))

    def execute_one(self, statement: str, *row: Any) -> None:
        """Queue a statement that must change exactly one row; otherwise the commit fails with TransitionError."""
        self._put(_Statement(statement, row, rows=1))

    def execute_rows(self, rows: int, statement: str, *values: Any) -> None:
        """Queue a statement that must change ``rows`` rows, as in :meth:`execute_one`."""
        self._put(_Statement(statement, values, rows))

    def execute_many(self, statement: str, rows: Sequence[_Row], all_change: bool = False) -> None:
        """Queue a statement for each of ``rows``. ``all_change``: each must change exactly one row, as in
        :meth:`execute_one`."""
        if rows:
            self._put(_Statement(statement, rows, len(rows) if all_change else None, many=True))

    def execute_each(self, statement: str, *row: Any, changes: bool = False) -> None:
        """Queue a row of a frequent statement: the rows between two other statements are executed together, in order
        of their statements and then of time. ``changes``: it must change exactly one row, as in :meth:`execute_one`."""
        self._put(_Each(statement, row, 1 if changes else None))

    def record(self, payload: bytes, digest: bytes, statement: str, *row: Any) -> None:
        """Queue a payload record and the statement that stores its place, as in :meth:`execute_each`. ``digest``: of
        the record. The last three values of the statement are segment, offset and length of the record."""
        self._put(_Record(self.segments, payload, digest, statement, row))

    def record_text(self, text: bytes, statement: str, row: _Row, after: _Row = ()) -> None:
        """Queue a record of the texts, which are never unlinked, and its statement, as in :meth:`record`. It must
        change exactly one row, as in :meth:`execute_one`. ``after``: the values after the place."""
        self._put(_Record(self.texts, text, None, statement, row, after, rows=1))

    def _put(self, queued: _Queued) -> None:
        self._queue.append(queued)
        if not self._woken:
            self.wake()

    def then(self, effect: Callable[..., object], *values: Any) -> None:
        """Call ``effect`` with these values when everything queued so far is durable."""
        self._effects.append((effect, values))
        if not self._woken:
            self.wake()

    def then_join(self, effect: Callable[[list[Any]], None], item: Any) -> None:
        """Call ``effect`` once with its items of a commit, as :meth:`then` does, and after those effects."""
        self._joined.setdefault(effect, []).append(item)
        if not self._woken:
            self.wake()

    def wake(self) -> None:
        """Call ``before_commit`` soon, and commit what is queued then."""
        self._woken = True
        self._wake.set()

    def query(self, statement: str, *row: Any) -> list[sqlite3.Row]:
        """Return committed rows. Short queries only: it runs in the event loop."""
        return self._reader.execute(statement, row).fetchall()

    async def run(self, interval: float = 0.0) -> None:
        """Commit until cancelled. An I/O error or a rejected statement ends this task and the coordinator.

        Args:
            interval: seconds from the beginning of a commit to that of the next one, at least.
        """
        loop = asyncio.get_running_loop()
        due = 0.0
        while True:
            await self._wake.wait()
            if loop.time() < due:
                await asyncio.sleep(due - loop.time())
            self._wake.clear()
            self._woken = False
            self.before_commit()
            queue, self._queue = self._queue, []
            effects, self._effects = self._effects, []
            joined, self._joined = self._joined, {}
            if queue:
                due = loop.time() + interval
                if self._thread is None:
                    self._commit(queue)
                else:
                    await loop.run_in_executor(self._thread, self._commit, queue)
            for effect, values in effects:
                effect(*values)
            for join, items in joined.items():
                join(items)

    async def drain(self) -> None:
        """Wait until everything queued so far is durable and its effects have run."""
        done = asyncio.Event()
        self.then(done.set)
        await done.wait()

    def close(self) -> None:
        """Stop committing and close the files."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._reader.close()
        if self._checkpoints is not None:
            self._checkpoints.close()
            self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self.segments.close()
        self.texts.close()
        self.db.close()
        self.unlock()

    def unlock(self) -> None:
        """Release the locks, as the system does when this process dies."""
        while self._locks:
            os.close(self._locks.pop())

    # --- in the store's thread, if it has one ---

    def _commit(self, queue: list[_Queued]) -> None:
        statements = self._statements(queue)
        self.segments.sync()
        self.texts.sync()
        self.db.execute("BEGIN IMMEDIATE")
        try:
            for sql, values, expected, many in statements:
                changed = (self.db.executemany if many else self.db.execute)(sql, values).rowcount
                if expected is not None and changed != expected:
                    names = ", ".join(map(self.describe, values[:4] if many else [values]))
                    raise TransitionError(f"{sql} changed {changed} rows instead of {expected}, for {names}")
            self.db.execute("COMMIT")
        except (sqlite3.Error, TransitionError):
            self.db.execute("ROLLBACK")
            raise
        if self._checkpoints is not None:
            self._checkpoints.after_commit()

    def _statements(self, queue: list[_Queued]) -> list[_Statement]:
        """Append the records of a queue; return its statements in order, those of :class:`_Each` joined."""
        statements: list[_Statement] = []
        rows: dict[str, tuple[list[_Row], int | None]] = {}  # statement → its rows since the last _Statement
        for queued in queue:
            if isinstance(queued, _Statement):
                statements += _joined(rows)
                statements.append(queued)
                rows = {}
                continue
            values = queued.values if isinstance(queued, _Each) else _append(queued)
            found = rows.get(queued.sql)
            if found is None:
                found = rows[queued.sql] = ([], queued.rows)
            found[0].append(values)
        return statements + _joined(rows)

    def describe(self, row: _Row) -> str:
        """Return what a row of a statement is about, for messages."""
        return str(tuple(row[-4:]))


def _append(record: _Record) -> _Row:
    """Append a record to its segments; return its row."""
    return (*record.before, *record.segments.append(record.content, record.digest), *record.after)


def _joined(rows: Mapping[str, tuple[list[_Row], int | None]]) -> list[_Statement]:
    """Return a statement for all rows of each. ``rows``: statement → its rows, and the changes of each."""
    return [
        _Statement(sql, many, None if changes is None else len(many), many=True)
        for sql, (many, changes) in rows.items()
    ]


def _acquire_lock(directory: Path) -> list[int]:
    """Lock a directory; return the descriptor of the lock, or none if the file system does not support locks.

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
        log.warning("%s: %s; a second coordinator on this storage is not prevented", directory / LOCK, error.strerror)
        os.close(lock)
        return []
    return [lock]


def check_version(path: Path, version: int) -> None:
    """Check that a ledger with user_version ``version`` has this schema; 0: new ledger.

    Raises:
        ValueError: it was written by another version of rljob.
    """
    if version not in (0, SCHEMA_VERSION):
        raise ValueError(
            f"{path} was written by another version of rljob (ledger {version}, this one reads {SCHEMA_VERSION});"
            " use that version or choose another run directory"
        )


def now() -> float:
    """Return the Unix time in seconds, for timestamps in the ledger."""
    return time.time()
