"""Draining engines get no new requests, and no sample is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from world import Agent, int32, job

from rljob.coordinator import draining
from rljob.coordinator.status_report import status_of
from rljob.protocol import agent_protocol as m
from rljob.protocol.contexts import context_digest
from rljob.protocol.shared_messages import VersionSpan


async def two_engines(new_world: Any, tmp_path: Path, **manifest: Any) -> Any:
    """Return a world of two engines that hold their requests."""
    world = new_world(job(**({"steps": 4, "n": 4, "g": 4} | manifest)), tmp_path)
    world.agents = [Agent(world, "one"), Agent(world, "two")]
    await world.start()
    for agent in world.agents:
        agent.hold = True
    world.connect_all()
    await world.settle()
    assert all(agent.queue for agent in world.agents)
    return world


def shown(world: Any) -> dict[str, tuple[int, bool]]:
    return {engine.name: (engine.load, engine.drained) for engine in status_of(world.run).engines}


async def test_a_draining_engine_finishes_its_requests_and_gets_no_new_ones(new_world: Any, tmp_path: Path) -> None:
    world = await two_engines(new_world, tmp_path)
    one, two = world.agents
    had = len(one.queue)
    world.run.draining.drain(["one.0"])
    two.hold = False
    await world.settle()
    assert shown(world)["one.0"] == (had, False)
    one.hold = False
    await world.settle()
    assert world.run.finished
    assert len(one.generated) == had
    assert shown(world)["one.0"] == (0, True) and shown(world)["two.0"][1] is False
    world.check_accounts()


async def test_an_engine_that_is_no_longer_drained_gets_requests_again(new_world: Any, tmp_path: Path) -> None:
    world = await two_engines(new_world, tmp_path)
    one, _ = world.agents
    had = len(one.queue)
    world.run.draining.drain(["one.0"])
    one.hold = False
    await world.settle()
    assert shown(world)["one.0"] == (0, True)
    world.run.draining.drain([])
    for agent in world.agents:
        agent.hold = False
    await world.settle()
    assert world.run.finished and len(one.generated) > had
    world.check_accounts()


async def test_requests_that_outlast_the_drain_time_continue_on_other_engines(
    new_world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await two_engines(new_world, tmp_path)
    one, two = world.agents
    generates = {generate.request_id.sample: generate for generate in one.queue}
    monkeypatch.setattr(draining, "PATIENCE_SECONDS", 0.0)
    world.run.draining.drain(["one.0"])
    while one.queue:  # the abort removes them
        await world.some(1)
    prefix = [m.Completion(g.request_id, int32([7]), b"\0\0\0\0", [VersionSpan(0, 0, 1)], "abort", 0.1,
                           context_digest(g.token_ids))
              for g in generates.values()]  # fmt: skip
    one.say(m.Completions(prefix))
    two.hold = False
    await world.settle()
    assert world.run.finished
    assert shown(world)["one.0"] == (0, True)
    rows = world.run.ledger.query("SELECT sample, attempt, finish FROM completions WHERE engine = 'one.0'")
    assert {row["sample"] for row in rows} == set(generates) and {row["finish"] for row in rows} == {"abort"}
    world.check_accounts()


async def test_engines_are_drained_by_pod_name_even_if_they_connect_later(new_world: Any, tmp_path: Path) -> None:
    world = await two_engines(new_world, tmp_path)
    third = Agent(world, "third")
    hello = third.hello
    third.hello = lambda: m.RegisterEngine(**{f: getattr(hello(), f) for f in hello().__struct_fields__} | {"pod": "p"})
    world.agents.append(third)
    world.run.draining.drain(["p"])
    third.connect()
    for agent in world.agents:
        agent.hold = False
    await world.settle()
    assert world.run.finished and third.generated == []
    assert shown(world)["p"] == (0, True)


async def test_an_engine_that_is_leaving_gets_no_new_requests(new_world: Any, tmp_path: Path) -> None:
    world = await two_engines(new_world, tmp_path)
    one, two = world.agents
    had = len(one.queue)
    one.say(m.EngineHeartbeat("leaving", 1, 0, 0))
    one.hold = two.hold = False
    await world.settle()
    assert world.run.finished and len(one.generated) == had
    world.check_accounts()
