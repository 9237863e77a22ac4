"""Exponential backoff between attempts."""

import asyncio
import random

from rljob.protocol.backoff import Backoff


def test_waits_double_up_to_the_last_and_restart_after_a_success(monkeypatch):
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    backoff = Backoff(0.5, 3.0)
    assert [backoff.next() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    backoff.reset()
    assert backoff.next() == 0.5


def test_a_wait_is_shortened_by_half_at_most():
    assert all(1.0 <= Backoff(2.0, 2.0).next() <= 2.0 for _ in range(100))


async def test_waiting_sleeps(monkeypatch):
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(random, "uniform", lambda low, high: low)
    await Backoff(4.0, 9.0).wait()
    assert slept == [2.0]
