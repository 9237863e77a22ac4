"""Shards on the wire: whatever does not fit the scalars is refused, whoever is away is waited for."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import zstandard

from rljob.protocol.messages import SampleTokens, Train
from rljob.scheduling.shards import assign
from rljob.trainer import fetch_batch as module
from rljob.trainer.batch import Row, lengths
from rljob.trainer.errors import SupersededError, UnrecoverableError
from rljob.trainer.fetch_batch import SERVER_ERRORS, check_shard, decode_shard, pull_shard


def test_a_shard_survives_the_wire(batch):
    train, samples = batch()
    data = zstandard.compress(msgspec.msgpack.encode(samples))
    rows = check_shard(decode_shard(data, 1 << 20), train.samples, list(range(len(samples))))
    assert [len(rows[i].token_ids_L) for i in range(len(rows))] == lengths(train.samples)
    assert sum(int(row.mask_L.sum()) for row in rows.values()) == sum(s.response_tokens for s in train.samples)


@pytest.mark.parametrize("data", [b"", b"no zstd", zstandard.compress(b"no msgpack"), zstandard.compress(b"\x91\x01")])
def test_what_is_not_a_shard_is_refused(data):
    with pytest.raises(UnrecoverableError, match="cannot be read"):
        decode_shard(data, 1 << 20)


def test_a_shard_that_decompresses_to_more_than_its_samples_need_is_refused():
    bomb = zstandard.compress(bytes(1 << 22))
    with pytest.raises(UnrecoverableError, match="larger than"):
        decode_shard(bomb, 1 << 16)


def change(samples: list[SampleTokens], **fields: object) -> list[SampleTokens]:
    return [msgspec.structs.replace(samples[0], **fields), *samples[1:]]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"sample": "g9.9"}, "other samples"),
        ({"token_ids": bytes(4)}, "does not have"),
        ({"logprobs": bytes(4)}, "does not have"),
        ({"loss_mask": b"\x01"}, "does not have"),
    ],
)
def test_a_shard_that_contradicts_the_scalars_is_refused(batch, fields, sentence):
    train, samples = batch()
    with pytest.raises(UnrecoverableError, match=sentence):
        check_shard(change(samples, **fields), train.samples, list(range(len(samples))))
    with pytest.raises(UnrecoverableError, match="other samples"):
        check_shard(samples[1:], train.samples, list(range(len(samples))))


def test_a_mask_that_does_not_cover_the_response_is_refused(batch):
    train, samples = batch()
    everything = bytes([1]) * len(samples[0].loss_mask)
    with pytest.raises(UnrecoverableError, match="loss mask"):
        check_shard(change(samples, loss_mask=everything), train.samples, list(range(len(samples))))


def pull(coordinator, train: Train) -> dict[int, Row]:
    return pull_shard(coordinator.url, coordinator.token, train, 1, 2)


@pytest.fixture
def impatient(monkeypatch) -> None:
    monkeypatch.setattr(module, "LAST_BACKOFF_SECONDS", 0.0)
    monkeypatch.setattr(module, "FIRST_BACKOFF_SECONDS", 0.0)


async def test_a_shard_is_pulled_however_long_the_coordinator_is_away(batch, coordinator, impatient):
    coordinator.batches, coordinator.incarnation = {0: batch()}, 1
    coordinator.answers = [503] * 30 + [500] * SERVER_ERRORS
    rows = await asyncio.to_thread(pull, coordinator, coordinator.batches[0][0])
    assert list(rows) == assign(lengths(coordinator.batches[0][0].samples), 2)[1]
    assert coordinator.pulls[0] == (0, 1, 2) and len(coordinator.pulls) == 31 + SERVER_ERRORS


@pytest.mark.parametrize(
    ("answers", "error"),
    [([409], SupersededError), ([404], UnrecoverableError), ([500] * (SERVER_ERRORS + 1), UnrecoverableError)],
)
async def test_a_coordinator_that_will_never_serve_a_shard_is_not_asked_for_ever(
    batch, coordinator, impatient, answers, error
):
    coordinator.batches, coordinator.answers = {0: batch()}, list(answers)
    with pytest.raises(error):
        await asyncio.to_thread(pull, coordinator, coordinator.batches[0][0])
    assert len(coordinator.pulls) == len(answers)
