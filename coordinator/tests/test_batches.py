"""Shards of a batch: which samples they have, how often the ledger is read, and which requests are answered."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any, cast

import httpx
import msgspec
import pytest
import zstandard
from starlette.applications import Starlette

from rljob.coordinator import batches
from rljob.coordinator.batches import BatchShards, of_record, of_records
from rljob.coordinator.ledger_api import MAX_NUMBER
from rljob.coordinator.shard_route import shard_route
from rljob.ledger.payload_record import PayloadRecord, encode_record
from rljob.ledger.queries import StoredSample
from rljob.ledger.store import Store
from rljob.protocol.batch_samples import SampleTokens
from rljob.protocol.shards import encode_selection
from rljob.protocol.shared_messages import VersionSpan


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Two formed batches of three samples; the steps whose rows were read."""
    found: list[int] = []

    def stored(store: Store, step: int) -> list[StoredSample]:
        found.append(step)
        if step > 1:
            return []
        return [StoredSample("[1.0]", [store.segments.append(record(f"s{step}.{n}"))], {}) for n in range(3)]

    monkeypatch.setattr(batches, "stored_samples_of_batch", stored)
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


@pytest.mark.parametrize(("prompt", "tokens", "spans"), [(2, 3, 2), (0, 3, 1), (2, 0, 0), (2, 0, 1)])
def test_a_sample_with_one_record_is_what_any_records_make(prompt: int, tokens: int, spans: int) -> None:
    numbers, logprobs = range(1, 1 + tokens), struct.pack(f"<{tokens}f", *[-0.5] * tokens)
    parts = [VersionSpan(version, version, tokens) for version in range(spans)]
    given, written = struct.pack(f"<{prompt}i", *range(prompt)), struct.pack(f"<{tokens}i", *numbers)
    one = PayloadRecord("s", 0, 3, given, written, logprobs, parts, "stop", "")
    assert of_record(one, 0.25) == of_records([one], [0.25])


async def answer(path: str, body: bytes = encode_selection([2, 0], 3), token: str = "right") -> httpx.Response:
    """Return the answer to a request for a shard; the trainer's incarnation is 4."""
    run = cast(
        Any, SimpleNamespace(ledger=Store(None), trainer=SimpleNamespace(session=SimpleNamespace(incarnation=4)))
    )
    app = Starlette(routes=[shard_route(run, lambda role, header: (role, header) == ("trainer", "Bearer right"))])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://coordinator") as client:
        return await client.post(path, content=body, headers={"Authorization": f"Bearer {token}"})


@pytest.mark.usefixtures("reads")
async def test_a_request_is_answered_with_the_shard() -> None:
    found = await answer("/v1/batches/0/shard?incarnation=4")
    assert (found.status_code, found.headers["content-type"]) == (200, "application/octet-stream")
    assert names(found.content) == ["s0.0", "s0.2"]


@pytest.mark.usefixtures("reads")
@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/batches/2/shard?incarnation=4", 404),
        ("/v1/batches/0/shard?incarnation=3", 409),
        ("/v1/batches/0/shard", 422),
        ("/v1/batches/0/shard?incarnation=-4", 422),
        ("/v1/batches/0/shard?incarnation=four", 422),
        ("/v1/batches/0/shard?incarnation=%D9%A4", 422),  # a digit four, but not of ASCII
        (f"/v1/batches/{MAX_NUMBER + 1}/shard?incarnation=4", 422),
        (f"/v1/batches/{'9' * 5000}/shard?incarnation=4", 422),
        ("/v1/batches/-1/shard?incarnation=4", 422),
    ],
)
async def test_a_request_for_another_batch_or_incarnation_is_refused(path: str, status: int) -> None:
    assert (await answer(path)).status_code == status
    assert (await answer(path, token="wrong")).status_code == 401


@pytest.mark.usefixtures("reads")
async def test_a_selection_of_another_batch_is_refused() -> None:
    for selection in (b"", encode_selection([9], 10), encode_selection([3], 4)):
        assert (await answer("/v1/batches/0/shard?incarnation=4", selection)).status_code == 422
