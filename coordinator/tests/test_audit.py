"""rljob audit: runs with injected faults pass at every moment."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from ledgers import RecordingTrainer, ask, make_run, reward
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


def test_the_audit_checks_groups_by_the_filter_of_their_task(tmp_path: Path) -> None:
    task = {
        "name": "sums",
        "data": {"reasoningGym": {"dataset": "chain_sum"}},
        "reward": "r",
        "sampling": {"maxTokens": 16},
        "groupFilter": {"kind": "none", "minMean": 0.25, "maxMean": 0.75},
    }
    run = make_run(tmp_path / "run", deaths="", steps=2, evaluation=None, tasks=[task])
    assert problems(run) == []
    reasons = ask(run, "SELECT DISTINCT reason FROM samples WHERE state = 'filtered'")
    assert {reason for (reason,) in reasons} <= {
        "the group's mean reward 0 is below groupFilter.minMean 0.25",
        "the group's mean reward 1 is above groupFilter.maxMean 0.75",
    }
    assert reasons, "nothing was filtered"
    manifest = json.loads((run / "job.json").read_text())
    for bounds, problem in (
        ({"minMean": 0.25, "maxMean": 0.4}, "it is in a batch, but the groupFilter of its task rejects it"),
        ({"minMean": 0.6, "maxMean": 0.75}, "it is in a batch, but the groupFilter of its task rejects it"),
        ({"minMean": None, "maxMean": None}, "it was filtered, but the groupFilter of its task accepts it"),
    ):
        manifest["spec"]["tasks"][0]["groupFilter"] = {"kind": "none", **bounds}
        (run / "job.json").write_text(json.dumps(manifest))
        assert any(problem in found for found in problems(run)), bounds
