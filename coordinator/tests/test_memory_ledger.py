"""The ledger of a simulated run: statements wait for a query, and nothing that a run sees depends on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rljob.ledger.payload_record import PayloadRecord
from rljob.ledger.states import Kind, State
from rljob.ledger.store import TransitionError
from rljob.simulation.memory_ledger import MOST_WAITING, MemoryLedger


@pytest.fixture
async def ledger() -> AsyncIterator[MemoryLedger]:
    ledger = MemoryLedger()
    committing = asyncio.create_task(ledger.run())
    await asyncio.sleep(0)
    yield ledger
    committing.cancel()
    ledger.close()


def count(ledger: MemoryLedger) -> Any:
    return ledger.query("SELECT COUNT(*) FROM groups")[0][0]


def admit(ledger: MemoryLedger, group: str, members: int = 1) -> None:
    samples = [f"{group}.{member}" for member in range(members)]
    ledger.admit_group(group, Kind.TRAIN, int(group[1:]), "sums", 0, 0, samples, 0)


async def test_a_query_sees_what_is_committed_and_effects_follow_it(ledger: MemoryLedger) -> None:
    seen: list[int] = []
    admit(ledger, "g0")
    ledger.then(lambda: seen.append(count(ledger)))
    assert count(ledger) == 0, "as on disk, it is not committed yet"
    await asyncio.sleep(0)
    assert seen == [1] and count(ledger) == 1


async def test_an_effect_of_an_effect_runs_in_the_same_iteration_after_its_statements(ledger: MemoryLedger) -> None:
    seen: list[int] = []

    def effect() -> None:
        admit(ledger, "g1")
        ledger.then(lambda: seen.append(count(ledger)))

    ledger.then(effect)
    await asyncio.sleep(0)
    assert seen == [1]


async def test_what_is_queued_before_the_start_is_committed_at_the_start() -> None:
    ledger, seen = MemoryLedger(), list[int]()
    admit(ledger, "g0")
    ledger.then(lambda: seen.append(count(ledger)))
    await asyncio.sleep(0)
    assert seen == []
    committing = asyncio.create_task(ledger.run())
    await asyncio.sleep(0)
    assert seen == [1]
    committing.cancel()
    ledger.close()


async def test_few_statements_wait(ledger: MemoryLedger) -> None:
    for number in range(MOST_WAITING):
        ledger.record_warning(f"warning {number}")
    assert ledger.db.execute("SELECT COUNT(*) FROM warnings").fetchone()[0] == 0
    await asyncio.sleep(0)
    assert ledger.db.execute("SELECT COUNT(*) FROM warnings").fetchone()[0] == MOST_WAITING


async def test_a_rejected_statement_ends_the_task() -> None:
    ledger = MemoryLedger()
    committing = asyncio.create_task(ledger.run())
    admit(ledger, "g0")
    ledger.end_samples(["g7.0"], State.FAILED, "there is no such sample")
    ledger.then(lambda: count(ledger))  # type: ignore[arg-type, return-value]
    with pytest.raises(TransitionError, match=r"sample g7\.0"):
        await committing
    ledger.close()


async def test_a_rejected_statement_that_nothing_reads_is_noticed_at_the_end() -> None:
    ledger, seen = MemoryLedger(), list[str]()
    committing = asyncio.create_task(ledger.run())
    ledger.end_samples(["g7.0"], State.FAILED, "there is no such sample")
    ledger.then(lambda: seen.append("effect"))
    await asyncio.sleep(0)
    assert seen == ["effect"], "unlike on disk: the statement has not been executed"
    committing.cancel()
    with pytest.raises(TransitionError, match=r"sample g7\.0"):
        ledger.close()


async def test_the_second_dispatch_of_a_sample_is_before_its_score(ledger: MemoryLedger) -> None:
    """All wait together, and rows of one statement are joined."""
    admit(ledger, "g0", members=2)
    ledger.discard_generation("g0.1", 1)
    for sample, attempt in (("g0.0", 0), ("g0.1", 1)):
        if attempt:
            ledger.record_dispatch_again(sample, 3)
        record = PayloadRecord(sample, 0, attempt, b"\0" * 4, b"\0" * 4, b"\0" * 4, [], "stop", "")
        ledger.record_completion(record, "engine", 2, 3, 3)
        ledger.record_score(sample, Kind.TRAIN, 1.0, [1.0], {}, "")
    await asyncio.sleep(0)
    rows = ledger.query("SELECT dispatched, reward, min_version FROM samples ORDER BY number")
    assert [tuple(row) for row in rows] == [(None, 1.0, 3), (None, 1.0, 3)]
