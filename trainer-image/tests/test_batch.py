"""Shards, microbatches and minibatches."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from rljob.protocol.messages import SampleTokens
from rljob.trainer.batch import (
    Row,
    check_shard,
    collate,
    decode_shard,
    lengths,
    plan_microbatches,
    plan_ranks,
    split_minibatches,
)
from rljob.trainer.errors import UnrecoverableError

CPU = torch.device("cpu")
tokens = st.lists(st.integers(1, 40), min_size=1, max_size=30)


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


@given(tokens, st.integers(1, 100))
def test_microbatches_hold_every_sample_once_within_the_budget(lengths, budget):
    plan = plan_microbatches(range(len(lengths)), lengths, budget)
    assert sorted(i for part in plan for i in part) == list(range(len(lengths)))
    for part in plan:
        longest = max(lengths[i] for i in part)
        assert longest * len(part) <= budget or len(part) == 1


@given(tokens, st.integers(1, 5), st.integers(1, 100), st.integers(1, 4))
def test_ranks_have_equally_many_microbatches_and_every_sample_once(lengths, ranks, budget, parts):
    """Mistakes 7 and 13: a rank that skips its turn, samples copied to make the batch divisible."""
    for minibatch in split_minibatches([str(i) for i in range(len(lengths))], min(parts, len(lengths))):
        plans = plan_ranks(minibatch, lengths, ranks, budget)
        assert len({len(plan) for plan in plans}) == 1
        assert sorted(i for plan in plans for part in plan for i in part) == list(minibatch)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=10), st.data())
def test_minibatches_hold_every_sample_once_and_whole_groups_while_there_are_enough(sizes, data):
    groups = [f"g{g}" for g, size in enumerate(sizes) for _ in range(size)]
    parts = data.draw(st.integers(1, len(groups)))
    minibatches = split_minibatches(groups, parts)
    assert len(minibatches) == parts and all(minibatches)
    assert [i for part in minibatches for i in part] == list(range(len(groups)))
    if parts <= len(sizes):
        owners = [{groups[i] for i in part} for part in minibatches]
        assert sum(map(len, owners)) == len(sizes)


def test_positions_predict_the_token_after_them_and_padding_counts_for_nothing():
    short = Row(np.array([5, 6, 7]), np.array([0, 0, -1], np.float32), np.array([False, False, True]))
    long = Row(np.array([1, 2, 3, 4]), np.array([0, -2, 0, -3], np.float32), np.array([False, True, False, True]))
    micro = collate([short, long], [1.0, 0.5], CPU)
    assert micro.token_ids_BL.tolist() == [[5, 6, 7, 0], [1, 2, 3, 4]]
    assert micro.keep_K.tolist() == [0, 1, 2]
    assert micro.targets_BK.tolist() == [[6, 7, 0], [2, 3, 4]]
    assert micro.mask_BK.tolist() == [[False, True, False], [True, False, True]]
    assert micro.behavior_BK.tolist() == [[0, -1, 0], [-2, 0, -3]]
    assert micro.temperature_B.tolist() == [1.0, 0.5]


def test_prompts_cost_no_logits_and_nothing_to_do_is_one_token_of_no_weight():
    prompt = Row(np.arange(6), np.zeros(6, np.float32), np.arange(6) >= 5)
    assert collate([prompt], [1.0], CPU).keep_K.tolist() == [4]
    empty = collate([], [], CPU)
    assert empty.token_ids_BL.shape == (1, 2)
    assert empty.mask_BK.tolist() == [[False]]
