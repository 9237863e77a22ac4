"""A shard that does not match the scalars is rejected; the client waits for an unavailable coordinator."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
import zstandard

from rljob.protocol.batch_samples import BatchSample, SampleTokens, Segment
from rljob.protocol.shared_messages import VersionSpan
from rljob.protocol.trainer_protocol import Train
from rljob.trainer import fetch_batch as module
from rljob.trainer.batch import Row
from rljob.trainer.errors import SupersededError, UnrecoverableError
from rljob.trainer.fetch_batch import SERVER_ERRORS, check_shard, decode_shard, pull_shard


def test_a_shard_is_decoded_unchanged(batch):
    train, samples = batch()
    data = zstandard.compress(msgspec.msgpack.encode(samples))
    rows = check_shard(decode_shard(data, 1 << 20), train.samples, list(range(len(samples))))
    assert [len(rows[i].token_ids_L) for i in range(len(rows))] == [sample.total_tokens for sample in train.samples]
    assert sum(int(row.mask_L.sum()) for row in rows.values()) == sum(s.response_tokens for s in train.samples)


DEEP = b"\x91\x96\xa1a\xc4\x00\xc4\x00\x90\x90" + b"\x91" * 100_000 + b"\xc0"
"""A SampleTokens with one element more than this version knows."""


@pytest.mark.parametrize(
    "data",
    [b"", b"no zstd", *map(zstandard.compress, (b"no msgpack", b"\x91\x01", b"\x91\x95\xa1\xff", DEEP))],
    ids=["empty", "no zstd", "no msgpack", "type", "text", "depth"],
)
def test_data_that_is_not_a_shard_is_refused(data):
    with pytest.raises(UnrecoverableError, match="cannot be read"):
        decode_shard(data, 1 << 20)


def test_a_shard_that_decompresses_to_more_than_its_samples_need_is_refused():
    bomb = zstandard.compress(bytes(1 << 22))
    with pytest.raises(UnrecoverableError, match="larger than"):
        decode_shard(bomb, 1 << 16)


async def test_a_shard_of_samples_with_many_short_turns_is_pulled(batch, coordinator):
    turns = 3000
    train, samples = batch()
    segments, spans = [Segment("prompt", 0, 1)], []
    for turn in range(turns):
        end = 1 + 2 * turn
        segments += [Segment("observation", end, end + 1), Segment("model", end + 1, end + 2, 0.5)]
        spans.append(VersionSpan(1 << 20, end + 1, end + 2))
    length = 1 + 2 * turns
    long = [SampleTokens(s.sample, bytes(4 * length), bytes(4 * length), segments, spans) for s in samples]
    scalars = [
        msgspec.structs.replace(s, reward=0.5 * turns, prompt_tokens=1, response_tokens=turns, total_tokens=length)
        for s in train.samples
    ]
    train = msgspec.structs.replace(train, samples=scalars)
    coordinator.batches, coordinator.incarnation = {train.step: (train, long)}, train.incarnation
    rows = await asyncio.to_thread(pull, coordinator, train)
    assert {len(row.token_ids_L) for row in rows.values()} == {length}


def change(samples: list[SampleTokens], **fields: object) -> list[SampleTokens]:
    return [msgspec.structs.replace(samples[0], **fields), *samples[1:]]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"sample": "g9.9"}, "other samples"),
        ({"token_ids": bytes(4)}, "does not have"),
        ({"logprobs": bytes(4)}, "does not have"),
        ({"logprobs": np.array([*[-1.0] * 9, np.nan], "<f4").tobytes()}, "an engine's log-probability is nan or inf"),
        ({"logprobs": np.array([*[-1.0] * 9, -np.inf], "<f4").tobytes()}, "an engine's log-probability is nan or"),
        ({"segments": []}, "do not cover"),
        ({"segments": [Segment("prompt", 0, 2), Segment("model", 2, 100)]}, "do not cover"),
        ({"segments": [Segment("prompt", 0, 2), Segment("model", 3, 12)]}, "do not cover"),
        ({"segments": [Segment("prompt", 0, 2), Segment("model", 1, 12)]}, "do not cover"),
    ],
)
def test_a_shard_that_contradicts_the_scalars_is_refused(batch, fields, sentence):
    train, samples = batch()
    with pytest.raises(UnrecoverableError, match=sentence):
        check_shard(change(samples, **fields), train.samples, list(range(len(samples))))
    with pytest.raises(UnrecoverableError, match="other samples"):
        check_shard(samples[1:], train.samples, list(range(len(samples))))


def test_rewards_of_segments_that_are_not_the_reward_of_the_sample_are_refused(batch):
    train, samples = batch()
    prompt, answer = samples[0].segments
    segments = [prompt, msgspec.structs.replace(answer, reward=answer.reward + 1e-6)]
    with pytest.raises(UnrecoverableError, match="do not add up to its reward"):
        check_shard(change(samples, segments=segments), train.samples, list(range(len(samples))))


def test_a_mask_that_does_not_cover_the_response_is_refused(batch):
    train, samples = batch()
    length = train.samples[0].total_tokens
    for segments in ([Segment("model", 0, length)], [Segment("prompt", 0, 4), Segment("model", 4, length)]):
        with pytest.raises(UnrecoverableError, match="loss mask"):
            check_shard(change(samples, segments=segments), train.samples, list(range(len(samples))))


def row_of(segments: list[Segment]) -> Row:
    """Return the row of a sample that has these segments."""
    length, written = segments[-1].end, [s.end - s.start for s in segments if s.kind == "model"]
    tokens = SampleTokens("g0.0", np.arange(length, dtype="<i4").tobytes(), bytes(4 * length), segments, [])
    reward = sum(segment.reward for segment in segments)
    scalars = BatchSample("g0.0", "g0", reward, segments[0].end, sum(written), length, 0, 1.0, 16)
    return check_shard([tokens], [scalars], [0])[0]


def test_a_row_of_several_turns_has_the_mask_of_all_answers_and_their_rewards():
    row = row_of(
        [
            Segment("prompt", 0, 3),
            Segment("model", 3, 5, 0.25),
            Segment("observation", 5, 8),
            Segment("model", 8, 10, -1.0),
            Segment("model", 10, 11, 2.0),
        ]
    )
    assert row.token_ids_L.tolist() == list(range(11))
    assert row.mask_L.tolist() == [False] * 3 + [True] * 2 + [False] * 3 + [True] * 3
    assert row.rewards_L.tolist() == [0, 0, 0, 0, 0.25, 0, 0, 0, 0, -1.0, 2.0]


@pytest.mark.parametrize(
    ("empty", "rewards"), [(0, [0, 0, 0.5, 1.0, 2.0]), (1, [0, 0, 1.5, 2.0]), (2, [0, 0, 0.5, 0, 3.0])]
)
def test_the_reward_of_a_turn_without_tokens_is_assigned_to_a_token_of_the_model(empty, rewards):
    segments, end = [Segment("prompt", 0, 2)], 2
    for turn, reward in enumerate((0.5, 1.0, 2.0)):
        written = (1, 2, 1)[turn] if turn != empty else 0
        segments.append(Segment("model", end, end + written, reward))
        end += written
    assert row_of(segments).rewards_L.tolist() == rewards


def test_a_sample_without_tokens_of_the_model_has_no_rewards():
    assert not row_of([Segment("prompt", 0, 3), Segment("model", 3, 3, 1.0)]).rewards_L.any()


MINE = [0, 3, 4, 7, 8, 11]


def pull(coordinator, train: Train) -> dict[int, Row]:
    return pull_shard(coordinator.url, coordinator.token, train, MINE)


@pytest.fixture
def impatient(monkeypatch) -> None:
    monkeypatch.setattr(module, "LAST_BACKOFF_SECONDS", 0.0)
    monkeypatch.setattr(module, "FIRST_BACKOFF_SECONDS", 0.0)


async def test_a_pull_is_retried_while_the_coordinator_is_unavailable(batch, coordinator, impatient):
    coordinator.batches, coordinator.incarnation = {0: batch()}, 1
    coordinator.answers = [503] * 30 + [500] * SERVER_ERRORS
    rows = await asyncio.to_thread(pull, coordinator, coordinator.batches[0][0])
    assert list(rows) == MINE
    assert coordinator.pulls[0] == (0, MINE) and len(coordinator.pulls) == 31 + SERVER_ERRORS


@pytest.mark.parametrize(
    ("answers", "error"),
    [([409], SupersededError), ([404], UnrecoverableError), ([500] * (SERVER_ERRORS + 1), UnrecoverableError)],
)
async def test_a_pull_ends_if_the_coordinator_never_serves_the_shard(batch, coordinator, impatient, answers, error):
    coordinator.batches, coordinator.answers = {0: batch()}, list(answers)
    with pytest.raises(error):
        await asyncio.to_thread(pull, coordinator, coordinator.batches[0][0])
    assert len(coordinator.pulls) == len(answers)
