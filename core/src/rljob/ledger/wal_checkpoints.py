"""Checkpoints of the ledger's WAL: by its length, and outside the thread that commits.

A thread copies the pages of the WAL to the database while commits continue. The commit after it copies the pages that
were committed meanwhile, which are few, so that the WAL begins again: SQLite overwrites it once all of it is copied and
no reader needs it. A long snapshot delays that; then the next checkpoint follows after as many bytes again.
"""

from __future__ import annotations

import sqlite3
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

CHECKPOINT_BYTES = 16 << 20
"""Length of the WAL at which it is checkpointed."""
_CHECKPOINT = "PRAGMA wal_checkpoint(PASSIVE)"


class WalCheckpoints:
    """Checkpoints of the database at ``path``. ``db``: the connection that commits."""

    def __init__(self, path: Path, db: sqlite3.Connection) -> None:
        self._db = db
        self._wal = path.with_name(f"{path.name}-wal")
        self._limit = CHECKPOINT_BYTES
        # SQLite cuts a WAL that begins again to this size: a longer file is a WAL that is longer than this.
        db.execute(f"PRAGMA journal_size_limit={CHECKPOINT_BYTES}")
        self._other = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._other.execute("PRAGMA synchronous=FULL")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger-checkpoint")
        self._running: Future[None] | None = None

    def after_commit(self) -> None:
        """Begin or finish a checkpoint if it is time. The thread that commits calls it after each commit.

        Raises:
            sqlite3.Error: the checkpoint failed.
        """
        if self._running is not None:
            if self._running.done():
                running, self._running = self._running, None
                running.result()
                self._db.execute(_CHECKPOINT).fetchall()
                self._limit = self._size() + CHECKPOINT_BYTES
            return
        size = self._size()
        if size <= CHECKPOINT_BYTES:
            self._limit = CHECKPOINT_BYTES
        elif size > self._limit:
            self._running = self._thread.submit(self._checkpoint)

    def _checkpoint(self) -> None:
        self._other.execute(_CHECKPOINT).fetchall()

    def _size(self) -> int:
        return self._wal.stat().st_size

    def close(self) -> None:
        """Wait for a running checkpoint, and close the connection."""
        self._thread.shutdown(wait=True)
        self._other.close()
