"""Ledger and payload: durable before effects, damage is detected, other versions are rejected."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import signal
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from rljob.ledger.reader import LedgerReader
from rljob.ledger.record_store import Location, PayloadError
from rljob.ledger.segments import MEMORY_SEGMENT_RECORDS, Segments, record_digest
from rljob.ledger.store import SCHEMA, StorageInUseError, Store, TransitionError

PLACE = "INSERT INTO meta VALUES (?, json_array(?,?,?))"
"""Stores the place of a record by a key."""


def places(store: Store) -> list[Location]:
    """Return the places that PLACE stored, in the order of their keys."""
    return [Location(*json.loads(row["value"])) for row in store.query("SELECT value FROM meta ORDER BY key")]


async def test_effects_happen_after_the_commit_of_what_was_queued_before_them(tmp_path: Path) -> None:
    store = Store(tmp_path)
    committing = asyncio.create_task(store.run())
    counts: list[int] = []
    store.execute("INSERT INTO meta VALUES ('a', '1')")
    store.then(lambda: counts.append(len(store.query("SELECT * FROM meta"))))
    store.execute("INSERT INTO meta VALUES ('b', '1')")
    store.then(lambda: counts.append(len(store.query("SELECT * FROM meta"))))
    assert counts == []
    await store.drain()
    assert counts == [2, 2]
    committing.cancel()
    store.close()


async def test_a_wake_by_what_runs_before_a_commit_is_not_lost(tmp_path: Path) -> None:
    store, calls, twice = Store(tmp_path), 0, asyncio.Event()

    def step() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            store.wake()
        else:
            twice.set()

    store.before_commit = step
    committing = asyncio.create_task(store.run())
    store.wake()
    await asyncio.wait_for(twice.wait(), 30)
    committing.cancel()
    store.close()


async def test_a_commit_that_fails_ends_the_store_and_nothing_after_it_happens(tmp_path: Path) -> None:
    store = Store(tmp_path)
    committing = asyncio.create_task(store.run())
    happened: list[str] = []
    store.execute("INSERT INTO meta VALUES ('a', NULL)")
    store.then(lambda: happened.append("acknowledged"))
    with pytest.raises(sqlite3.IntegrityError):
        await committing
    assert happened == []
    store.close()


async def test_a_statement_of_many_rows_fails_unless_each_changes_one(tmp_path: Path) -> None:
    store = Store(tmp_path)
    committing = asyncio.create_task(store.run())
    store.execute_many("INSERT INTO meta VALUES (?,?)", [("a", "1"), ("b", "1")])
    store.execute_many("UPDATE meta SET value = ? WHERE key = ?", [], all_change=True)
    await store.drain()
    store.execute_many("UPDATE meta SET value = ? WHERE key = ?", [("2", "a"), ("2", "none")], all_change=True)
    with pytest.raises(TransitionError, match="changed 1 rows instead of 2"):
        await committing
    assert dict(store.query("SELECT key, value FROM meta")) == {"a": "1", "b": "1"}
    store.close()


async def test_payload_is_durable_before_the_statement_that_refers_to_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    committing = asyncio.create_task(store.run())
    for number, text in enumerate((b"one", b"two")):
        store.record(text, record_digest(text), PLACE, f"{number}")
    await store.drain()
    assert [store.segments.read(at) for at in places(store)] == [b"one", b"two"]
    committing.cancel()
    store.close()


def test_a_damaged_or_missing_record_is_an_error(tmp_path: Path) -> None:
    segments = Segments(tmp_path)
    at = segments.append(b"payload")
    segments.sync()
    path = tmp_path / "00000000.segment"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(PayloadError, match="damaged at byte 0"):
        segments.read(at)
    with pytest.raises(PayloadError, match="cannot be read"):
        segments.read(Location(7, 0, 1))
    segments.close()


@pytest.mark.parametrize(
    "change",
    [{"length": -3}, {"length": -100}, {"length": 1 << 43}, {"length": 1 << 70}, {"length": 1}, {"offset": -1},
     {"offset": 1 << 70}, {"offset": 1.5}, {"segment": "q"}, {"segment": -1}],
)  # fmt: skip
def test_a_damaged_location_is_an_error(tmp_path: Path, change: dict[str, Any]) -> None:
    segments = Segments(tmp_path)
    place = segments.append(b"content")
    segments.sync()
    assert segments.read(place) == b"content"
    with pytest.raises(PayloadError):
        segments.read(place._replace(**change))
    segments.close()


def test_a_restart_writes_to_a_new_segment_after_a_torn_record(tmp_path: Path) -> None:
    segments = Segments(tmp_path)
    at = segments.append(b"whole")
    segments.close()
    with (tmp_path / "00000000.segment").open("ab") as file:
        file.write(b"\x07\x00")
    again = Segments(tmp_path)
    other = again.append(b"next")
    again.sync()
    assert other.segment == 1
    assert (again.read(at), again.read(other)) == (b"whole", b"next")
    again.close()


def test_segments_that_checkpoints_cover_are_unlinked(tmp_path: Path) -> None:
    for text in (b"a", b"b", b"c"):
        segments = Segments(tmp_path)
        segments.append(text)
        segments.close()
    segments = Segments(tmp_path)
    at = segments.append(b"d")
    segments.sync()
    segments.remove_below(2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00000002.segment", "00000003.segment"]
    segments.remove_below(9)
    assert segments.read(at) == b"d", "the segment being written stays"
    segments.close()


@pytest.mark.parametrize("version", [2, 8, 99])
def test_a_ledger_of_another_version_is_rejected_with_a_message(tmp_path: Path, version: int) -> None:
    db = sqlite3.connect(tmp_path / "ledger.sqlite")
    db.execute(f"PRAGMA user_version={version}")
    db.close()
    with pytest.raises(ValueError, match=rf"another version of rljob \(ledger {version}"):
        Store(tmp_path)


def test_tables_are_created_all_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rljob.ledger.store.SCHEMA", f"{SCHEMA} CREATE TABLE broken (;")
    with pytest.raises(sqlite3.OperationalError):
        Store(tmp_path)
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        assert db.execute("PRAGMA user_version").fetchone() == (0,)
        assert db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone() == (0,)
    db.close()


def test_a_second_coordinator_on_one_storage_is_rejected_and_readers_are_not(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(StorageInUseError, match="in use by another coordinator; wait until its run has ended, or give"):
        Store(tmp_path)
    with LedgerReader(tmp_path) as ledger:
        assert ledger.value("SELECT COUNT(*) FROM groups") == 0
    store.close()
    Store(tmp_path).close()


def test_a_ledger_that_cannot_be_opened_is_not_left_locked(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").write_bytes(b"no database" * 100)
    for _ in range(2):
        with pytest.raises(Exception, match="not a database"):
            Store(tmp_path)


def _hold(storage: Path, ready: Any) -> None:
    _store = Store(storage)
    ready.send(None)
    signal.pause()


def test_the_lock_is_released_when_its_process_dies(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_hold, args=(tmp_path, theirs))
    process.start()
    assert ours.poll(30)
    with pytest.raises(StorageInUseError):
        Store(tmp_path)
    process.kill()
    process.join()
    Store(tmp_path).close()


async def test_a_store_in_memory_commits_in_the_event_loop_and_writes_no_file(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store(None)
    committing = asyncio.create_task(store.run())
    happened: list[int] = []
    for number in range(MEMORY_SEGMENT_RECORDS + 1):
        content = b"%d" % number
        store.record(content, record_digest(content), PLACE, f"{number:04d}")
    store.then(lambda: happened.append(len(store.query("SELECT * FROM meta"))))
    await store.drain()
    assert happened == [MEMORY_SEGMENT_RECORDS + 1]
    first, *_, last = places(store)
    assert (first.segment, last.segment) == (0, 1)
    store.segments.remove_below(1)
    assert store.segments.read(last) == b"%d" % MEMORY_SEGMENT_RECORDS
    with pytest.raises(KeyError):
        store.segments.read(first)
    committing.cancel()
    store.close()
    assert list(tmp_path.iterdir()) == []
