"""Ledger and payload: durable before effects, damage is noticed, other versions are refused."""

from __future__ import annotations

import asyncio
import sqlite3
from array import array
from pathlib import Path

import pytest

from rljob.coordinator.policy import record_advantages
from rljob.coordinator.segments import Location, PayloadError, Segments
from rljob.coordinator.store import Store


async def test_effects_happen_after_the_commit_of_what_was_queued_before_them(tmp_path: Path) -> None:
    store = Store(tmp_path)
    committing = asyncio.create_task(store.run())
    seen: list[int] = []
    store.execute("INSERT INTO meta VALUES ('a', '1')")
    store.then(lambda: seen.append(len(store.query("SELECT * FROM meta"))))
    store.execute("INSERT INTO meta VALUES ('b', '1')")
    store.then(lambda: seen.append(len(store.query("SELECT * FROM meta"))))
    assert seen == []
    await store.drain()
    assert seen == [2, 2]
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


async def test_payload_is_durable_before_the_statement_that_refers_to_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    committing = asyncio.create_task(store.run())
    places: list[Location] = []

    def statement(at: Location) -> tuple[str, tuple[object, ...]]:
        places.append(at)
        return "INSERT INTO meta VALUES (?, ?)", (str(at.offset), "x")

    for text in (b"one", b"two"):
        store.record(text, statement)
    await store.drain()
    assert [store.segments.read(at) for at in places] == [b"one", b"two"]
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


def test_a_torn_record_is_left_behind_by_the_next_start(tmp_path: Path) -> None:
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


def test_a_ledger_of_another_version_is_refused_with_a_sentence(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "ledger.sqlite")
    db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(ValueError, match=r"another version of rljob \(ledger 99"):
        Store(tmp_path)


async def test_a_ledger_of_the_version_before_is_brought_up_to_this_one(tmp_path: Path) -> None:
    Store(tmp_path).close()
    db = sqlite3.connect(tmp_path / "ledger.sqlite")
    db.execute("ALTER TABLE samples DROP COLUMN advantage")
    db.execute("DROP TABLE served")
    db.execute("INSERT INTO samples (id, group_id, member, reward) VALUES ('g0.0', 'g0', 0, 0.5)")
    db.execute("PRAGMA user_version=1")
    db.commit()
    db.close()
    store = Store(tmp_path)
    assert [tuple(row) for row in store.query("SELECT reward, advantage FROM samples")] == [(0.5, None)]
    assert store.query("SELECT COUNT(*) FROM served")[0][0] == 0
    store.close()
    Store(tmp_path).close()


async def test_advantages_go_to_the_samples_of_their_batch_in_its_order(tmp_path: Path) -> None:
    store = Store(tmp_path)
    committing = asyncio.create_task(store.run())
    for sample in ("g0.0", "g0.1", "g1.0"):
        store.execute("INSERT INTO samples (id, group_id, member) VALUES (?, 'g', 0)", sample)
    store.execute("INSERT INTO batches VALUES (0, ?, 0)", '["g1.0", "g0.1"]')
    await store.drain()
    record_advantages(store, 0, array("f", [-0.5, 1.5]).tobytes())
    record_advantages(store, 0, b"")
    await store.drain()
    rows = store.query("SELECT id, advantage FROM samples ORDER BY id")
    assert [tuple(row) for row in rows] == [("g0.0", None), ("g0.1", 1.5), ("g1.0", -0.5)]
    with pytest.raises(ValueError, match="zip"):
        record_advantages(store, 0, bytes(4))
    with pytest.raises(ValueError, match="zip"):
        record_advantages(store, 7, bytes(4))
    committing.cancel()
    store.close()
