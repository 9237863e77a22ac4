"""rljob audit: runs with injected faults pass at every moment."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from ledgers import RecordingTrainer, reward
from world import World, job

from rljob.ledger.audit import audit


def problems(run: Path) -> list[str]:
    """Return the problems that an audit reports."""
    return [f"{check.name}: {problem}" for check in audit(run).checks for problem in check.problems]


VICTIMS = ("coordinator", "runner", "engine", "agent", "trainer", "runner's connection", "trainer's connection")


async def inject_fault(world: Any, victim: str) -> None:
    """Kill a component, or cut its connection."""
    part = {"runner": world.runner, "engine": world.agents[0], "agent": world.agents[0], "trainer": world.trainer}
    if victim == "coordinator":
        world.kill_coordinator()
        await world.start()
    else:
        part[victim.split("'")[0]].disconnect()
        if "'" not in victim:
            part[victim].reborn()
    world.connect_all()


@pytest.mark.parametrize("seed", range(12))
async def test_a_run_passes_the_audit_after_every_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr("os.fdatasync", lambda descriptor: None)
    rng = random.Random(seed)
    manifest = job(
        alpha=rng.choice([0, 1, 2]),
        steps=6,
        n=rng.choice([1, 2, 3]),
        evaluation=rng.choice([None, {"problems": 3, "everySteps": 2}]),
        algorithm={"groupFilter": rng.choice(["none", "nonconstant"])},
        scheduling={
            "redundancy": {"groups": rng.choice([0, 1, 2]), "members": rng.choice([0, 1])},
            "onDeadline": rng.choice(["wait", "regenerate"]),
        },
    )
    (tmp_path / "job.json").write_text(manifest.model_dump_json(by_alias=True))
    world = World(manifest, tmp_path, engines=rng.choice([1, 2]))
    world.trainer = RecordingTrainer(world)
    world.reward = reward
    await world.start()
    world.connect_all()
    for _ in range(rng.randrange(2, 14)):
        for agent in world.agents:
            agent.hold = rng.random() < 0.4  # its requests span weight updates
        await world.some(rng.randrange(14))
        if rng.random() < 0.15:
            world.trainer.drift = str(seed)  # its replay differs: a new lineage
        await inject_fault(world, rng.choice(VICTIMS))
        await world.store.drain()
        assert problems(tmp_path) == []
    for agent in world.agents:
        agent.hold = False
    await world.settle()
    world.close()
    report = audit(tmp_path)
    assert report.finished == world.run.finished
    assert problems(tmp_path) == []
