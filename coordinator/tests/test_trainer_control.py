"""Deriving the trainer's next command has no side effects; the run forms batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from world import job


async def test_deriving_the_next_command_has_no_side_effects(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(alpha=0), tmp_path)
    await world.start()
    world.connect_all()
    awaited = 0
    for _ in range(400):
        await world.some(1)
        run = world.run
        before = (set(run.scheduler.batches), len(run.ledger._statements), run.trainer.session.busy)
        awaited += run.trainer.awaits_new_batch
        first = run.trainer._next_command()
        assert run.trainer._next_command() == first
        assert before == (set(run.scheduler.batches), len(run.ledger._statements), run.trainer.session.busy)
        if run.finished:
            break
    assert world.run.finished and awaited > 0


async def test_a_batch_is_served_only_once_it_is_durable(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(), tmp_path)
    await world.start()
    world.connect_all()
    world.trainer.hold = True
    await world.settle()
    world.trainer.hold = False
    while not world.run.is_formed(0):
        for part in world.parts:
            part.step()
        world.run.advance()
        if world.run.is_formed(0):
            assert world.run.recorded_batch(0) is None, "formed in this iteration, not committed yet"
            break
        await world.store.drain()
    await world.store.drain()
    batch = world.run.recorded_batch(0)
    assert batch is not None and len(batch.samples) == 4
    assert world.run.recorded_batch(1) is None
