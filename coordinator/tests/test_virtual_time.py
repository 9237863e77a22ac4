"""The event loop in virtual time."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from rljob.simulation.virtual_time import run_in_virtual_time


def test_timers_of_one_time_run_in_the_order_in_which_they_were_set() -> None:
    """Many others, before and after them, some cancelled, do not change the order."""
    ran: list[int] = []

    async def program() -> None:
        loop = asyncio.get_running_loop()
        for number in range(200):
            loop.call_at(5.0, ran.append, number)
            other = loop.call_at(4.0 + number % 3, ran.append, -1)
            if number % 2:
                other.cancel()
        await asyncio.sleep(10.0)

    run_in_virtual_time(program())
    assert [number for number in ran if number >= 0] == list(range(200))
    assert ran.count(-1) == 100


def test_a_callback_that_raises_is_logged_and_the_loop_continues(caplog: Any) -> None:
    async def program() -> float:
        loop = asyncio.get_running_loop()
        loop.call_soon(int, "no number")
        loop.call_later(1.0, int, "no number")
        await asyncio.sleep(2.0)
        return loop.time()

    with caplog.at_level(logging.ERROR):
        assert run_in_virtual_time(program()) == 2.0
    assert caplog.text.count("raised") == 2


def test_the_time_is_that_of_the_next_timer_and_a_cancelled_callback_does_not_run() -> None:
    times: list[float] = []

    async def program() -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(times.append, -1.0).cancel()
        loop.call_later(0.1, lambda: times.append(loop.time()))
        loop.call_later(0.1 + 0.2, lambda: times.append(loop.time()))
        await asyncio.sleep(1e6)
        times.append(loop.time())

    run_in_virtual_time(program())
    assert times == [0.1, 0.1 + 0.2, 1e6]
