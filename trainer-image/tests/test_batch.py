"""Microbatches, minibatches and their tensors."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rljob.trainer.batch import (
    Row,
    collate,
    plan_microbatches,
    plan_ranks,
    split_minibatches,
)

CPU = torch.device("cpu")
tokens = st.lists(st.integers(1, 40), min_size=1, max_size=30)


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


def test_positions_predict_the_next_token_and_padding_is_masked():
    short = Row(np.array([5, 6, 7]), np.array([0, 0, -1], np.float32), np.array([False, False, True]), np.zeros(3))
    long = Row(
        np.array([1, 2, 3, 4]), np.array([0, -2, 0, -3], np.float32), np.array([False, True, False, True]), np.zeros(4)
    )
    micro = collate([short, long], [1.0, 0.5], CPU)
    assert micro.token_ids_BL.tolist() == [[5, 6, 7, 0], [1, 2, 3, 4]]
    assert micro.keep_K.tolist() == [0, 1, 2]
    assert micro.targets_BK.tolist() == [[6, 7, 0], [2, 3, 4]]
    assert micro.mask_BK.tolist() == [[False, True, False], [True, False, True]]
    assert micro.behavior_BK.tolist() == [[0, -1, 0], [-2, 0, -3]]
    assert micro.temperature_B.tolist() == [1.0, 0.5]


def test_prompts_need_no_logits_and_an_empty_microbatch_has_no_weight():
    prompt = Row(np.arange(6), np.zeros(6, np.float32), np.arange(6) >= 5, np.zeros(6))
    assert collate([prompt], [1.0], CPU).keep_K.tolist() == [4]
    empty = collate([], [], CPU)
    assert empty.token_ids_BL.shape == (1, 2)
    assert empty.mask_BK.tolist() == [[False]]
