"""The work queue: each key once, never processed concurrently, delays and back-off. Times are simulated."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob.operator.work_queue import LAST_BACKOFF_SECONDS, ClosedError, Schedule, WorkQueue


def test_a_key_is_queued_once():
    schedule = Schedule()
    schedule.add("a", 0.0)
    schedule.add("b", 1.0)
    schedule.add("a", 2.0)
    assert len(schedule) == 2
    assert schedule.take(5.0) == ("a", 5.0)
    assert schedule.take(5.0) == ("b", 4.0)
    assert schedule.take(5.0) is None


def test_a_key_added_during_processing_is_processed_again():
    schedule = Schedule()
    schedule.add("a", 0.0)
    schedule.take(0.0)
    schedule.add("a", 1.0)
    assert schedule.take(1.0) is None
    schedule.done("a")
    assert schedule.take(3.0) == ("a", 2.0)
    schedule.done("a")
    assert schedule.take(4.0) is None


def test_the_earlier_of_two_delays_counts():
    schedule = Schedule()
    schedule.add_after("a", 10.0, 0.0)
    schedule.add_after("a", 3.0, 0.0)
    schedule.add_after("a", 20.0, 0.0)
    assert schedule.next_due() == 3.0
    assert schedule.take(2.9) is None
    assert schedule.take(3.5) == ("a", 0.5)
    schedule.done("a")
    assert schedule.next_due() is None and schedule.take(100.0) is None


def test_a_later_due_time_is_dropped_when_the_key_is_taken():
    schedule = Schedule()
    schedule.add_after("a", 10.0, 0.0)
    schedule.add("a", 1.0)
    assert schedule.take(1.0) == ("a", 0.0)
    schedule.done("a")
    assert schedule.next_due() is None


def test_back_off_doubles_with_each_failure_up_to_a_minute_and_ends_with_success():
    schedule = Schedule()
    waits = [schedule.failed("a", 0.0) for _ in range(12)]
    assert waits[:4] == [0.1, 0.2, 0.4, 0.8]
    assert waits[-1] == LAST_BACKOFF_SECONDS
    assert schedule.failed("b", 0.0, at_least=7.0) == 7.0, "a server that asks to wait is waited for"
    schedule.succeeded("a")
    assert schedule.failed("a", 0.0) == 0.1


@given(st.lists(st.tuples(st.sampled_from(["add", "later", "take", "done"]), st.integers(0, 3)), max_size=60))
def test_no_key_is_processed_twice_at_a_time_and_none_is_lost(steps):
    schedule, now, working, owed = Schedule(), 0.0, set(), set()
    for step, key in steps:
        now += 1.0
        if step == "add":
            schedule.add(key, now)
            owed.add(key)
        elif step == "later":
            schedule.add_after(key, 2.0, now)
            owed.add(key)
        elif step == "take" and (taken := schedule.take(now)):
            assert taken[0] not in working and taken[1] >= 0
            working.add(taken[0])
            owed.discard(taken[0])
        elif step == "done" and key in working:
            schedule.done(key)
            working.discard(key)
    for key in sorted(working):
        schedule.done(key)
    rest = set()
    while taken := schedule.take(now + 10.0):
        rest.add(taken[0])
        schedule.done(taken[0])
    assert owed <= rest


async def test_a_waiting_worker_is_woken():
    queue = WorkQueue(clock=lambda: 0.0)
    getting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add("a")
    assert await getting == ("a", 0.0)


async def test_a_cancelled_worker_leaves_its_key_to_another():
    queue = WorkQueue(clock=lambda: 0.0)
    first, second = asyncio.create_task(queue.get()), asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add("a")
    first.cancel()
    assert await second == ("a", 0.0)


async def test_a_closed_queue_returns_no_key():
    queue = WorkQueue(clock=lambda: 0.0)
    getting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add("a")
    queue.close()
    with pytest.raises(ClosedError):
        await getting
