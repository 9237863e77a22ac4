"""The circuit breaker on a clock of the test."""

from __future__ import annotations

import math
import random

import pytest

from rljob.runner.circuit_breaker import CircuitBreaker


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(random, "uniform", lambda least, most: most)  # the longest waits
    return Clock()


def opened(clock: Clock) -> CircuitBreaker:
    breaker = CircuitBreaker(clock)
    for _ in range(3):
        breaker.send()
        breaker.failed()
    return breaker


def test_two_failures_in_a_row_do_not_open_it(clock: Clock) -> None:
    breaker = CircuitBreaker(clock)
    for outcome in (breaker.failed, breaker.failed, breaker.succeeded, breaker.failed, breaker.failed):
        assert not breaker.send()
        outcome()
    assert breaker.seconds == 0


def test_three_failures_in_a_row_open_it_for_half_a_second(clock: Clock) -> None:
    breaker = opened(clock)
    assert breaker.seconds == 0.5
    clock.now += 0.375
    assert breaker.seconds == 0.125
    clock.now += 0.2
    assert breaker.seconds == 0


def test_one_trial_at_a_time_decides_whether_it_closes(clock: Clock) -> None:
    breaker = opened(clock)
    clock.now += 0.5
    assert breaker.send()
    assert breaker.seconds == math.inf
    breaker.succeeded()
    assert breaker.seconds == 0 and not breaker.send()


def test_each_failed_trial_doubles_the_wait_up_to_five_seconds(clock: Clock) -> None:
    breaker = opened(clock)
    waits = []
    for _ in range(6):
        waits.append(breaker.seconds)
        clock.now += breaker.seconds
        assert breaker.send()
        breaker.failed()
    assert waits == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]


def test_a_trial_without_an_outcome_lets_another_one_follow(clock: Clock) -> None:
    breaker = opened(clock)
    clock.now += 0.5
    breaker.send()
    breaker.end_trial()
    assert breaker.seconds == 0 and breaker.send()
