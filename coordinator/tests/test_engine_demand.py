"""How many engines a pool needs: it converges for pipelines and synchronous steps, and is measured over whole steps."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob.coordinator.engine_demand import Counters, EngineDemand, engines_needed


def pipeline(engines: int, demand: float) -> tuple[float, float]:
    """Return the shares (trainer waiting, engines busy) where generation and training overlap fully."""
    return max(0.0, 1 - engines / demand), min(1.0, demand / engines)


def synchronous(engines: int, work: float) -> tuple[float, float]:
    """Return the shares where generation, ``work`` times as long as training with one engine, and training take
    turns."""
    generation = work / engines
    return generation / (generation + 1), generation / (generation + 1)


@pytest.mark.parametrize(
    ("engines", "waiting", "busy", "needed"),
    [
        (4, 0.0, 1.0, 4.0),
        (4, 0.1, 1.0, 4.0),  # hardly ever
        (4, 0.5, 1.0, 8.0),
        (4, 0.9, 1.0, 8.0),  # at most twice
        (4, 0.25, 0.9, 4 / 0.75),
        (4, 0.9, 0.4, 4.0),  # something else is slow
        (4, 0.0, 0.0, 2.0),  # at least half
        (4, 0.0, 0.68, 3.2),
        (1, 0.0, 0.0, 0.5),
    ],
)
def test_a_pool_grows_while_training_waits_and_shrinks_while_engines_are_idle(engines, waiting, busy, needed):
    assert engines_needed(engines, waiting, busy) == pytest.approx(needed)


def converge(shares, parameter: float, engines: int) -> list[int]:
    """Return the numbers of engines until they stay."""
    path = [engines]
    for _ in range(40):
        path.append(max(1, math.ceil(engines_needed(path[-1], *shares(path[-1], parameter)) - 1e-9)))
        if path[-1] == path[-2]:
            return path
    raise AssertionError(f"it does not converge: {path}")


@given(st.floats(0.05, 200), st.integers(1, 400))
def test_a_pipeline_gets_the_engines_that_it_needs_and_keeps_them(demand, engines):
    end = converge(pipeline, demand, engines)[-1]
    assert end >= math.floor(demand * 0.8)
    assert end <= math.ceil(demand / 0.85) or end == engines


@given(st.floats(0.05, 200), st.integers(1, 400))
def test_a_synchronous_job_turns_at_most_once(work, engines):
    path = converge(synchronous, work, engines)
    assert len({after > before for before, after in pairwise(path) if after != before}) <= 1
    assert path[-1] == 1 or synchronous(path[-1], work)[0] >= 0.1


def measure(demand: EngineDemand, engines: int, steps: int, generation: float, training: float, begin: float = 0.0):
    """Have a pool generate, then the trainer train, for some steps; return the time at the end."""
    at, waited, generating, idle = begin, 0.0, 0.0, 0.0
    for version in range(steps):
        for phase, seconds in (("generation", generation), ("training", training)):
            for _ in range(int(seconds)):
                at += 1
                waited += phase == "generation"
                generating += engines * (phase == "generation")
                idle += engines * (phase == "training")
                demand.update(engines, Counters(at, version, waited, generating, idle))
    return at


def test_phases_of_a_step_do_not_count_alone():
    demand = EngineDemand()
    measure(demand, 4, 1, generation=60, training=60)
    assert demand.needed is None, "no whole step yet"
    for steps in (4, 5, 6):
        measure(demand, 4, steps, generation=60, training=60)
        assert demand.needed == 4


def test_short_steps_are_measured_together():
    demand = EngineDemand()
    measure(demand, 4, 12, generation=3, training=1)
    assert demand.needed == pytest.approx(8, rel=0.1)


def test_a_new_number_of_engines_is_measured_anew_and_the_last_result_stays_until_then():
    demand = EngineDemand()
    at = measure(demand, 2, 10, generation=9, training=1)
    assert demand.needed == pytest.approx(4)
    demand.update(3, Counters(at, 10, 0, 0, 0))
    demand.update(4, Counters(at, 10, 0, 0, 0))
    assert demand.needed == pytest.approx(4)
    measure(demand, 4, 10, generation=4, training=6, begin=at)
    assert demand.needed == 4


def test_a_step_that_takes_very_long_is_measured_before_it_ends():
    demand = EngineDemand()
    for at in range(130):
        demand.update(1, Counters(at, 0, at, at, 0))
    assert demand.needed == 2


def test_nothing_is_measured_while_the_run_does_not_train():
    demand = EngineDemand()
    for _ in range(200):
        demand.update(1, None)
        assert demand.needed is None
    demand.update(0, Counters(0, 0, 0, 0, 0))
    assert demand.needed is None
