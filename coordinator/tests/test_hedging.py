"""Hedged requests, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from rljob.runner.hedging import HedgeDelay, hedged
from rljob.simulation.virtual_time import run_in_virtual_time


async def answers(text: str, seconds: float, ended: list[str] | None = None) -> str:
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        (ended if ended is not None else []).append(text)
        raise
    if text.startswith("error"):
        raise RuntimeError(text)
    return text


def run(first: Coroutine[Any, Any, str], again: Any, seconds: float | None) -> tuple[str, float]:
    async def main() -> tuple[str, float]:
        return await hedged(first, again, seconds), asyncio.get_running_loop().time()

    return run_in_virtual_time(main())


def test_an_answer_in_time_is_not_asked_for_twice() -> None:
    assert run(answers("a", 1.0), lambda: pytest.fail("asked again"), 1.5) == ("a", 1.0)


def test_the_second_request_wins_and_the_first_is_cancelled() -> None:
    ended: list[str] = []
    assert run(answers("a", 10.0, ended), lambda: answers("b", 1.0), 2.0) == ("b", 3.0)
    assert ended == ["a"]


def test_the_first_request_may_still_win() -> None:
    ended: list[str] = []
    assert run(answers("a", 2.5), lambda: answers("b", 1.0, ended), 2.0) == ("a", 2.5)
    assert ended == ["b"]


def test_a_failure_of_one_request_waits_for_the_other() -> None:
    assert run(answers("a", 5.0), lambda: answers("error b", 1.0), 2.0) == ("a", 5.0)
    assert run(answers("error a", 3.0), lambda: answers("b", 5.0), 2.0) == ("b", 7.0)


def test_if_both_fail_the_error_is_that_of_the_first() -> None:
    with pytest.raises(RuntimeError, match="error a"):
        run(answers("error a", 3.0), lambda: answers("error b", 0.5), 2.0)


def test_without_another_replica_the_first_request_is_waited_for() -> None:
    assert run(answers("a", 9.0), lambda: None, 2.0) == ("a", 9.0)


def test_a_cancelled_request_cancels_both() -> None:
    ended: list[str] = []

    async def main() -> None:
        task = asyncio.create_task(hedged(answers("a", 9, ended), lambda: answers("b", 9, ended), 1.0))
        await asyncio.sleep(2.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run_in_virtual_time(main())
    assert sorted(ended) == ["a", "b"]


def test_the_delay_is_one_and_a_half_times_the_95th_percentile_of_the_last_128_requests() -> None:
    delay = HedgeDelay()
    for _ in range(19):
        delay.observe(1.0)
    assert delay.seconds is None
    for i in range(1, 101):
        delay.observe(i / 10)
    for _ in range(28):
        delay.observe(0.01)
    assert delay.seconds == pytest.approx(1.5 * 9.4)  # the 122nd of 128: six are slower


def test_the_delay_is_at_least_50_milliseconds() -> None:
    delay = HedgeDelay()
    for _ in range(30):
        delay.observe(0.001)
    assert delay.seconds == 0.05


def test_at_most_one_request_of_twenty_is_sent_twice() -> None:
    delay, taken = HedgeDelay(), 0
    for _ in range(100):
        delay.observe(1.0)
        taken += delay.take()
    assert taken == 5
