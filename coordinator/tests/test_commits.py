"""When the ledger commits, in virtual time: at once after a pause, then after an interval, and steps before commits."""

from __future__ import annotations

import asyncio
from typing import Any

from rljob.ledger.store import Store
from rljob.simulation.virtual_time import run_in_virtual_time

INTERVAL = 0.005


def insert(store: Store, key: str) -> None:
    store.execute("INSERT INTO meta VALUES (?, '1')", key)


def rows(store: Store) -> int:
    return len(store.query("SELECT * FROM meta"))


def test_commits_begin_an_interval_after_each_other_and_at_once_after_a_pause() -> None:
    async def program() -> list[tuple[float, int]]:
        store, loop, seen = Store(None), asyncio.get_running_loop(), list[tuple[float, int]]()
        committing = asyncio.create_task(store.run(INTERVAL))
        for number, at in enumerate((0.0, 0.001, 0.004, 0.007, 0.1, 0.1051)):
            await asyncio.sleep(at - loop.time())
            insert(store, str(number))
            store.then(lambda: seen.append((round(loop.time(), 6), rows(store))))
        await store.drain()
        committing.cancel()
        return seen

    times = [(0.0, 1), (0.005, 3), (0.005, 3), (0.01, 4), (0.1, 5), (0.1051, 6)]
    assert run_in_virtual_time(program()) == times


def test_steps_are_taken_before_a_commit_and_are_in_it() -> None:
    async def program() -> list[int]:
        store, seen = Store(None), list[int]()
        committing = asyncio.create_task(store.run(INTERVAL))

        def step() -> None:
            insert(store, f"step {len(seen)}")
            store.then(lambda: seen.append(rows(store)))

        store.before_commit = step
        insert(store, "a")
        store.wake()
        await asyncio.sleep(INTERVAL / 2)
        store.wake()
        insert(store, "b")
        await store.drain()
        committing.cancel()
        return seen

    assert run_in_virtual_time(program()) == [2, 4]


def test_joined_effects_come_once_a_commit_after_the_others() -> None:
    async def program() -> list[Any]:
        store, seen = Store(None), list[Any]()
        committing = asyncio.create_task(store.run(INTERVAL))
        for part in ("ab", "c"):
            for key in part:
                insert(store, key)
                store.then_join(seen.append, (key, rows(store)))
            store.then(lambda: seen.append(rows(store)))
            await store.drain()
        committing.cancel()
        return seen

    assert run_in_virtual_time(program()) == [2, [("a", 0), ("b", 0)], 3, [("c", 2)]]
