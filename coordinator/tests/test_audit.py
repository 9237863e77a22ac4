"""rljob audit: runs that are right are clean, whatever died in them, and every way to be wrong is found."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from ledgers import RecordingTrainer, reward
from world import World, job

from rljob.ledger.audit import audit


def problems(run: Path) -> list[str]:
    """Return what an audit finds."""
    return [f"{check.name}: {problem}" for check in audit(run).checks for problem in check.problems]


DEATHS = ("coordinator", "runner", "engine", "agent", "trainer", "runner's connection", "trainer's connection")


async def strike(world: Any, victim: str) -> None:
    """Kill a part, or cut its connection."""
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
async def test_a_run_is_clean_at_every_moment_whatever_dies_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr("os.fdatasync", lambda descriptor: None)
    fate = random.Random(seed)
    manifest = job(
        alpha=fate.choice([0, 1, 2]),
        steps=6,
        n=fate.choice([1, 2, 3]),
        evaluation=fate.choice([None, {"problems": 3, "everySteps": 2}]),
        algorithm={"groupFilter": fate.choice(["none", "nonconstant"])},
        scheduling={
            "redundancy": {"groups": fate.choice([0, 1, 2]), "members": fate.choice([0, 1])},
            "onDeadline": fate.choice(["wait", "regenerate"]),
        },
    )
    (tmp_path / "job.json").write_text(manifest.model_dump_json(by_alias=True))
    world = World(manifest, tmp_path, engines=fate.choice([1, 2]))
    world.trainer = RecordingTrainer(world)
    world.reward = reward
    await world.start()
    world.connect_all()
    for _ in range(fate.randrange(2, 14)):
        for agent in world.agents:
            agent.hold = fate.random() < 0.4  # what it has in hand lives through updates
        await world.some(fate.randrange(14))
        if fate.random() < 0.15:
            world.trainer.drift = str(seed)  # what it replays comes out differently: a new lineage
        await strike(world, fate.choice(DEATHS))
        await world.store.drain()
        assert problems(tmp_path) == []
    for agent in world.agents:
        agent.hold = False
    await world.settle()
    world.close()
    report = audit(tmp_path)
    assert report.finished == world.run.finished
    assert problems(tmp_path) == []
