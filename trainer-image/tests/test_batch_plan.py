"""Plans of batches: every sample once, balanced ranks, little padding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob.protocol.batch_samples import BatchSample
from rljob.protocol.trainer_protocol import Train
from rljob.trainer.batch_plan import PADDED_LIMIT, assign, plan_batch, positions, split_minibatches

RANKS = 8


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 5), st.integers(1, 100), st.booleans())
def test_ranks_have_equally_many_microbatches_within_the_budget_and_every_sample_once(tokens, ranks, budget, packed):
    """Mistakes 7 and 13: a rank that skips its turn, samples copied to make the batch divisible."""
    samples = list(range(0, len(tokens), 2))
    plan = assign(samples, tokens, ranks, budget, packed)
    assert len(plan) == ranks and len({len(microbatches) for microbatches in plan}) == 1 and plan[0]
    assert sorted(i for microbatches in plan for part in microbatches for i in part) == samples
    for part in (part for microbatches in plan for part in microbatches):
        assert len(part) <= 1 or positions([part], tokens, packed) <= budget
        assert len(part) <= 1 or positions([part], tokens) <= PADDED_LIMIT * budget
    longest, total = max((tokens[i] for i in samples), default=0), sum(tokens[i] for i in samples)
    slowest = max(positions(microbatches, tokens, packed) for microbatches in plan)
    assert max(longest, total / ranks) <= slowest <= positions([samples], tokens, packed)


def log_normal(seed: int) -> Train:
    """Return the scalars of 512 samples in groups of 8, of log-normal length: median 512 tokens, sigma 0.5."""
    tokens = np.random.default_rng(seed).lognormal(np.log(512), 0.5, 512).astype(int).tolist()
    samples = [BatchSample(f"{i}", f"{i // 8}", 0.0, 1, n - 1, n, 0, 1.0, 4096) for i, n in enumerate(tokens)]
    return Train(1, 0, samples, False)


@pytest.mark.parametrize(("packed", "most"), [(False, 1.15), (True, 1.08)])
@pytest.mark.parametrize("minibatches", [1, 4, 8, 16])
def test_ranks_of_log_normal_lengths_are_balanced_in_each_minibatch(minibatches, packed, most):
    train = log_normal(minibatches)
    trained_N = np.ones(512, np.bool_)
    plans = [plan_batch(train, trained_N, minibatches, rank, RANKS, 16_384, packed) for rank in range(RANKS)]
    assert sorted(i for plan in plans for i in plan.indices) == list(range(512))
    assert len({plan.lockstep for plan in plans}) == 1
    assert plans[0].lockstep <= most
    for number, minibatch in enumerate(plans[0].minibatches):
        found = [i for plan in plans for part in plan.microbatches[number] for i in part]
        assert sorted(found) == minibatch


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
