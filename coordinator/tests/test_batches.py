"""Shards of a batch: which samples they have, and how often the ledger is read."""

from __future__ import annotations

import struct

import msgspec
import pytest
import zstandard

from rljob.coordinator import batches
from rljob.coordinator.batches import BatchShards
from rljob.ledger.payload_record import PayloadRecord, encode_record
from rljob.ledger.queries import BatchRow
from rljob.ledger.segments import Location
from rljob.ledger.store import Store
from rljob.protocol.batch_samples import SampleTokens
from rljob.protocol.shards import encode_selection
from rljob.protocol.shared_messages import VersionSpan


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Two formed batches of three samples; the steps whose rows were read."""
    found: list[int] = []

    def batch(_: Store, step: int) -> list[BatchRow]:
        found.append(step)
        if step > 1:
            return []
        return [BatchRow(f"s{step}.{n}", "s", "task", 0, 1.0, "[1.0]", 1, 1, 2, 0) for n in range(3)]

    def locations(store: Store, step: int) -> dict[str, list[Location]]:
        return {f"s{step}.{n}": [store.segments.append(record(f"s{step}.{n}"))] for n in range(3)}

    monkeypatch.setattr(batches, "batch", batch)
    monkeypatch.setattr(batches, "locations_of_batch", locations)
    return found


def record(sample: str) -> bytes:
    token, logprob = struct.pack("<i", 7), struct.pack("<f", -1.0)
    spans = [VersionSpan(0, 0, 1)]
    return encode_record(PayloadRecord(sample, 0, 0, token, token, logprob, spans, "stop", ""))


def names(shard: bytes) -> list[str]:
    return [one.sample for one in msgspec.msgpack.decode(zstandard.decompress(shard), type=list[SampleTokens])]


def test_the_ranks_of_a_step_read_the_rows_of_its_batch_once(reads: list[int]) -> None:
    shards = BatchShards(Store(None))
    parts = [names(shards.shard(1, encode_selection([rank], 3))) for rank in range(3)]
    assert parts == [["s1.0"], ["s1.1"], ["s1.2"]] and reads == [1]
    assert names(shards.shard(0, encode_selection([2, 0], 3))) == ["s0.0", "s0.2"] and reads == [1, 0]


def test_a_batch_that_is_not_formed_yet_is_read_again(reads: list[int]) -> None:
    shards = BatchShards(Store(None))
    for _ in range(2):
        with pytest.raises(LookupError, match="there is no batch 2"):
            shards.shard(2, b"")
    assert reads == [2, 2]
