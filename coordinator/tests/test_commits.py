"""When the ledger commits, in virtual time: at once after a pause, then after an interval."""

from __future__ import annotations

import asyncio

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
