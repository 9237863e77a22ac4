"""Checkpoints of the ledger's WAL: by bytes, beside the commits, and not again and again while a reader needs it."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from threading import Event

import pytest

from rljob.ledger import wal_checkpoints
from rljob.ledger.store import PAGE_BYTES, Store

LIMIT = 64 * PAGE_BYTES
ROW = "x" * 4 * PAGE_BYTES


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(wal_checkpoints, "CHECKPOINT_BYTES", LIMIT)
    opened = Store(tmp_path)
    yield opened
    opened.close()


def put(store: Store, key: int) -> int:
    """Commit a row of some pages; return the length of the WAL."""
    store.execute("INSERT INTO meta VALUES (?,?)", str(key), ROW)
    store._commit(store._queue)
    store._queue = []
    assert store._checkpoints is not None
    return store._checkpoints._size()


def commit(store: Store, key: int) -> int:
    """Commit a row of some pages, and wait for a checkpoint that it began; return the length of the WAL."""
    put(store, key)
    assert store._checkpoints is not None
    if store._checkpoints._running is not None:
        wait([store._checkpoints._running])
    return store._checkpoints._size()


def test_the_wal_begins_again_when_it_is_longer_than_the_limit(store: Store, tmp_path: Path) -> None:
    sizes = [commit(store, key) for key in range(200)]
    assert LIMIT < max(sizes) < 2 * LIMIT
    assert sizes[-1] <= max(sizes) and any(b < a for a, b in itertools.pairwise(sizes))
    assert (tmp_path / "ledger.sqlite").stat().st_size > 100 * len(ROW), "its pages are in the database"
    assert len(store.query("SELECT * FROM meta")) == 200


def test_the_wal_begins_again_although_its_checkpoint_did_not_copy_the_last_commits(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, begin = store._checkpoints, Event()
    assert checkpoints is not None
    checkpoint = checkpoints._checkpoint
    monkeypatch.setattr(checkpoints, "_checkpoint", lambda: begin.wait(60) and checkpoint())
    keys = itertools.count()
    while checkpoints._running is None:
        put(store, next(keys))
    with sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT COUNT(*) FROM meta").fetchone()
        longest = put(store, next(keys))  # the reader keeps the checkpoint from copying this, as time does
        begin.set()
        wait([checkpoints._running])
    reader.close()
    assert put(store, next(keys)) > longest, "it copies the rest"
    assert put(store, next(keys)) <= LIMIT


def test_a_short_wal_is_not_checkpointed(store: Store, tmp_path: Path) -> None:
    for key in range(3):
        commit(store, key)
    assert (tmp_path / "ledger.sqlite").stat().st_size < len(ROW)


def test_a_snapshot_keeps_the_wal_and_each_limit_of_bytes_is_one_checkpoint(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store._checkpoints is not None
    begun = []
    checkpoint = store._checkpoints._checkpoint
    monkeypatch.setattr(store._checkpoints, "_checkpoint", lambda: begun.append(checkpoint()))
    commit(store, 0)
    with sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT COUNT(*) FROM meta").fetchone() == (1,)
        sizes = [commit(store, key) for key in range(1, 100)]
        assert reader.execute("SELECT COUNT(*) FROM meta").fetchone() == (1,)
        assert sizes == sorted(sizes)
        assert sizes[-1] / LIMIT / 2 < len(begun) <= sizes[-1] / LIMIT
    reader.close()
    commit(store, 100)
    assert min(commit(store, key) for key in range(101, 150)) <= LIMIT + len(ROW)


def test_a_checkpoint_that_fails_ends_the_store(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise sqlite3.OperationalError("database or disk is full")

    assert store._checkpoints is not None
    monkeypatch.setattr(store._checkpoints, "_checkpoint", fail)
    with pytest.raises(sqlite3.OperationalError, match="disk is full"):
        for key in range(100):
            commit(store, key)
