"""An agent program that lost its runner begins again: nothing of its earlier lease is generated further or trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from world import int32, job, observation

from rljob.ledger.audit import audit
from rljob.ledger.queries import completions
from rljob.protocol import agent_protocol as m

AGENT_TASK = {
    "name": "sums",
    "data": {"reasoningGym": {"dataset": "chain_sum"}},
    "loop": "agent",
    "agent": {"function": "mine.agent:solve"},
    "sampling": {"maxTokens": 16},
}


async def until(world: Any, condition: Callable[[], object]) -> None:
    """Run until ``condition`` is true."""
    for _ in range(200):
        if condition():
            return
        await world.some(1)
    raise AssertionError("the condition is never true")


def restart(world: Any, victims: str) -> None:
    """Restart the runner, whose programs write another first message in each life."""
    if "runner" in victims:
        world.runner.disconnect()
        world.runner.reborn()
        world.runner.prompt = lambda lease: [lease.row, 1, 2, 90 + world.runner.lives]


@pytest.mark.parametrize("turns", [0, 1], ids=["first turn", "second turn"])
@pytest.mark.parametrize("victims", ["runner", "runner and coordinator", "runner, coordinator and engine"])
async def test_another_lease_begins_again(new_world: Any, tmp_path: Path, victims: str, turns: int) -> None:
    world = new_world(job(n=1, g=2, alpha=0, steps=2, tasks=[AGENT_TASK]), tmp_path)
    world.runner.turns_of = lambda sample: 2
    await world.start()
    (engine,) = world.agents
    engine.hold = not turns
    world.connect_all()
    if turns:  # hold the engine once both samples have their first turn
        await until(world, lambda: any(len(done) == 1 for done in world.runner.turns.values()))
        engine.hold = True
    await until(world, lambda: any(request.request_id.turn == turns for request in engine.queue))
    lease = world.runner.driving["g0.0"].lease
    restart(world, victims)
    if "coordinator" in victims:
        world.kill_coordinator()
        await world.start()
    if "engine" in victims:
        engine.reborn()
    world.connect_all()
    await until(world, lambda: "g0.0" in world.runner.driving)
    begun = world.runner.driving["g0.0"]
    assert begun.lease > lease and begun.attempt > 0
    engine.hold = False
    await world.settle()
    assert world.run.finished and world.run.failure is None
    world.check_accounts()
    assert not world.store.query("SELECT reason FROM samples WHERE state = 'failed'")
    records = completions(world.store, "g0.0", begun.attempt)
    assert [record.turn for record in records] == [0, 1]
    assert [record.given for record in records] == [int32([0, 1, 2, 91]), observation(0)]
    (tmp_path / "job.json").write_text(world.manifest.model_dump_json(by_alias=True))
    failed = [check for check in audit(tmp_path).checks if not check.ok]
    assert [check.name for check in failed] == ["checkpoints exist and match the ledger"], "the trainer is simulated"


async def test_a_runner_that_reconnects_keeps_its_turns(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(n=1, g=1, alpha=0, steps=2, tasks=[AGENT_TASK]), tmp_path)
    world.runner.turns_of = lambda sample: 3
    await world.start()
    world.connect_all()
    await until(world, lambda: len(world.runner.turns.get("g0.0", [])) == 1)
    lease = world.runner.driving["g0.0"]
    world.kill_coordinator()
    await world.start()
    world.connect_all()
    await world.settle()
    assert world.run.finished and world.run.failure is None
    assert [record.attempt for record in completions(world.store, "g0.0", 0)] == [lease.attempt] * 3


async def test_a_completion_of_an_earlier_lease_is_acknowledged(new_world: Any, tmp_path: Path) -> None:
    """The engine finishes a request after a restart of the coordinator, before any runner has a lease again."""
    world = new_world(job(n=1, g=1, alpha=0, steps=1, tasks=[AGENT_TASK]), tmp_path)
    world.runner.turns_of = lambda sample: 1
    await world.start()
    (engine,) = world.agents
    engine.hold = True
    world.connect_all()
    await until(world, lambda: engine.queue)
    restart(world, "runner")
    world.kill_coordinator()
    await world.start()
    engine.hold = False
    engine.connect()
    await until(world, lambda: world.run.trajectories.by_sample["g0.0"].early)
    world.connect_all()
    await world.settle()
    assert world.run.finished and not engine.unacknowledged
    (record,) = completions(world.store, "g0.0", 0)
    assert record.attempt > 0 and record.given == int32([0, 1, 2, 91])


async def test_an_engine_ends_a_request_of_an_earlier_lease(new_world: Any, tmp_path: Path) -> None:
    """The engine registers after a restart of the coordinator, when another runner has the lease already."""
    world = new_world(job(n=1, g=1, alpha=0, steps=1, tasks=[AGENT_TASK]), tmp_path)
    world.runner.turns_of = lambda sample: 1
    await world.start()
    (engine,) = world.agents
    engine.hold = True
    world.connect_all()
    await until(world, lambda: engine.queue)
    (old,) = (request.request_id for request in engine.queue)
    restart(world, "runner")
    world.kill_coordinator()
    await world.start()
    world.runner.connect()
    engine.connect()
    assert m.Abort([old], discard=True) in engine.peer.take()
    engine.queue.clear()
    engine.hold = False
    world.connect_all()
    await world.settle()
    assert world.run.finished
