"""The floor of the coordinator's benchmark stores as often and in the same pages as the coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.floor_coordinator import COMMIT_SECONDS, Floor, Outbox
from rljob.coordinator import serve
from rljob.ledger.store import PAGE_BYTES
from rljob.simulation.virtual_time import run_in_virtual_time


@pytest.fixture
def floor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Floor]:
    """Return a floor that stores without a thread, for virtual time."""

    async def to_thread(function: Any, *arguments: Any) -> None:
        function(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    floor = Floor(tmp_path)
    yield floor
    floor.payload.close()
    floor.db.close()


def test_commits_of_the_floor_have_the_interval_and_the_pages_of_the_coordinator(floor: Floor) -> None:
    commits = []
    store = floor.store
    floor.store = lambda rows: (commits.append(len(rows)), store(rows))  # type: ignore[assignment, method-assign]

    async def program() -> None:
        committing = asyncio.create_task(floor.commit())
        for number in range(100):  # one message a millisecond
            floor.take(Outbox(None), ["TrajectoryScored", f"g0.{number}", 1.0, [], "text"])
            await asyncio.sleep(0.001)
        await asyncio.sleep(COMMIT_SECONDS)
        committing.cancel()

    run_in_virtual_time(program())
    assert serve.COMMIT_SECONDS == COMMIT_SECONDS
    assert sum(commits) == 100 and 20 <= len(commits) <= 22
    assert floor.db.execute("PRAGMA page_size").fetchone()[0] == PAGE_BYTES


def test_what_depends_on_a_commit_leaves_after_it_and_a_message_without_one_stores_nothing(floor: Floor) -> None:
    agent, runner = Outbox(None), Outbox(None)

    async def program() -> None:
        committing = asyncio.create_task(floor.commit())
        floor.take(agent, ["RegisterEngine"])
        floor.take(runner, ["RegisterRunner"])
        floor.take(runner, ["GenerateRequest", "g0.0", 0, "context"])
        await asyncio.sleep(1.0)
        assert [message[0] for message in agent.messages] == ["PrepareWeights", "Generate"]
        assert floor.db.total_changes == 0
        floor.take(agent, ["Completions", [[["g0.0", 0, 0], b"tokens", b"logprobs", "stop", "context"]]])
        assert len(agent.messages) == 2
        await asyncio.sleep(1.0)
        committing.cancel()

    run_in_virtual_time(program())
    assert agent.messages[2] == ["AckCompletions", [["g0.0", 0, 0]]]
    assert runner.messages[-1][:4] == ["GenerateResult", "g0.0", 0, b"tokens"]
    assert floor.db.execute("SELECT * FROM completions").fetchall() == [("g0.0", 0, 0, len(b"tokenslogprobs"))]
