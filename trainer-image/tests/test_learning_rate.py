"""Schedules of the learning rate: rates of every step by hand, and properties of any schedule."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob.api.optimizer_checks import optimizer_problems
from rljob.api.roles import Optimizer
from rljob.trainer.learning_rate import learning_rate

WARM, S = 2, 6
HALF = 0.5**0.5


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [0.5, 1, 1, 1, 1, 1, 1, 1]),
        ({"schedule": "linear", "schedule_steps": S}, [0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0]),
        ({"schedule": "linear", "schedule_steps": S, "final_ratio": 0.2}, [0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ({"schedule": "cosine", "schedule_steps": S}, [0.5, 1, 1, (1 + HALF) / 2, 0.5, (1 - HALF) / 2, 0, 0]),
        ({"schedule": "wsd", "schedule_steps": S, "decay_steps": 2}, [0.5, 1, 1, 1, 1, 0.5, 0, 0]),
        ({"schedule": "wsd", "schedule_steps": S, "decay_steps": 4}, [0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0]),
    ],
)
def test_every_step_has_the_rate_of_its_schedule(fields, expected):
    settings = Optimizer(learning_rate=0.4, warmup_steps=WARM, **fields)
    assert not list(optimizer_problems(settings, "trainer.optimizer"))
    rates = [learning_rate(settings, step) for step in range(len(expected))]
    assert rates == pytest.approx([0.4 * share for share in expected], abs=1e-15)


def test_without_a_warm_up_the_first_step_has_the_full_rate():
    for fields in ({}, {"schedule": "linear", "schedule_steps": 1}, {"schedule": "cosine", "schedule_steps": 9}):
        assert learning_rate(Optimizer(learning_rate=0.4, **fields), 0) == 0.4


@given(
    st.sampled_from(["linear", "cosine", "wsd"]), st.integers(0, 50), st.integers(1, 100), st.floats(0, 1), st.data()
)
def test_after_the_warm_up_a_schedule_never_rises_and_ends_at_its_final_rate(schedule, warmup, length, final, data):
    steps = warmup + length
    decay = data.draw(st.integers(1, length)) if schedule == "wsd" else None
    settings = Optimizer(
        learning_rate=0.4, warmup_steps=warmup, schedule=schedule, schedule_steps=steps, decay_steps=decay,
        final_ratio=final,
    )  # fmt: skip
    assert not list(optimizer_problems(settings, "trainer.optimizer"))
    rates = [learning_rate(settings, step) for step in range(steps + 2)]
    assert all(earlier < later for earlier, later in itertools.pairwise(rates[:warmup]))
    assert all(earlier >= later - 1e-15 for earlier, later in itertools.pairwise(rates[warmup:]))
    assert max(rates) == rates[warmup] == 0.4
    assert rates[steps] == rates[steps + 1] == pytest.approx(0.4 * final)
    assert rates[steps - 1] > 0
