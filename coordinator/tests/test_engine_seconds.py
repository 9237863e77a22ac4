"""The seconds of engines by activity: exact sums over restarts, losses and silence."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from world import job

from rljob.coordinator.engine_seconds import ENGINE_ACTIVITIES, EngineSeconds
from rljob.coordinator.engines import SILENT_HEARTBEATS, EngineRecord
from rljob.coordinator.metrics import RunCollector
from rljob.coordinator.progress import RunHistory, UpdateTotals
from rljob.coordinator.status_report import status_of
from rljob.coordinator.tracking import TrackingWriter, finish
from rljob.protocol import agent_protocol as m
from rljob.protocol.agent_protocol import HEARTBEAT_SECONDS
from rljob.scheduling.request import Request, SharedPrefix


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def engine(instance: str, pool: str = "main", pod: str = "") -> EngineRecord:
    connection: Any = SimpleNamespace(heard=math.inf)
    return EngineRecord(instance, 4, 64, pool=pool, connection=connection, pod=pod, serving=(0, 0))


def update(accounts: EngineSeconds, engines: dict[str, EngineRecord], now: float) -> None:
    """Update as if all engines had changed, also those that are gone."""
    held = [account.holder for account in accounts.accounts if account.holder is not None]
    accounts.update([*engines.values(), *held], engines, now)


def give_request(record: EngineRecord) -> None:
    record.add(Request(("g0.0", 0, 0), SharedPrefix(), (0, 0, 0), 8))


def test_each_second_has_one_activity() -> None:
    clock = Clock()
    accounts, one = EngineSeconds(clock), engine("a.0")
    one.serving = None

    def spend(seconds: float, *engines: EngineRecord, silent: bool = False) -> None:
        heard = clock.now - (SILENT_HEARTBEATS * HEARTBEAT_SECONDS + 1 if silent else 0)
        for each in engines:
            if each.connection is not None:
                each.connection.heard = heard
        update(accounts, {each.instance: each for each in engines}, clock.now)
        clock.now += seconds

    spend(1, one)  # it has no weights
    one.serving = (0, 0)
    spend(2, one)
    give_request(one)
    spend(4, one)
    one.begin_update(1)
    spend(8, one)  # requests wait meanwhile
    one.end_update()
    spend(16, one, silent=True)  # for a second
    one.connection = None
    spend(32, one)
    spend(64)  # it is forgotten
    assert accounts.seconds() == {"generating": 4, "waiting": 2, "paused": 8, "dead": 113}
    assert sum(accounts.seconds().values()) == clock.now - 100


class Updates:
    """One engine with a request, and the seconds that its steps take."""

    def __init__(self) -> None:
        self.clock, self.one = Clock(), engine("a.0")
        self.accounts = EngineSeconds(self.clock)
        give_request(self.one)

    def spend(self, seconds: float) -> None:
        update(self.accounts, {"a.0": self.one}, 100.0)
        self.clock.now += seconds
        assert sum(self.accounts.seconds().values()) == self.clock.now - 100

    def acknowledge(self, pause: float, since_resume: float) -> None:
        self.accounts.acknowledged(self.one, pause, since_resume)
        self.one.ack = m.WeightAck(1, 0, 1, "", 0.0, 0.0, 0.0, pause, since_resume)

    def check(self, **seconds: float) -> None:
        self.spend(0)
        assert {name: spent for name, spent in self.accounts.seconds().items() if spent} == seconds


def test_an_engine_generates_in_an_update_before_its_pause_and_after_its_resume() -> None:
    run = Updates()
    run.spend(1)
    run.one.begin_update(1)
    run.spend(2 + 4 + 8)
    assert run.accounts.seconds() == {"generating": 1, "waiting": 0, "paused": 14, "dead": 0}
    assert run.accounts.decided_seconds() == {"generating": 1, "waiting": 0, "paused": 0, "dead": 0}
    run.acknowledge(4, 8)
    run.spend(16)  # until the trainer has sent all
    run.one.end_update()
    run.check(generating=1 + 2 + 8 + 16, paused=4)
    assert run.accounts.decided_seconds() == run.accounts.seconds()


def test_an_engine_whose_requests_end_in_an_update_generates_until_then() -> None:
    run = Updates()
    run.one.begin_update(1)
    run.spend(1 + 2 + 4)
    run.one.remove(("g0.0", 0, 0))
    run.spend(8)
    run.acknowledge(2, 4 + 8)
    run.spend(16)
    run.check(generating=1 + 4, paused=2 + 8 + 16)


def test_an_update_that_is_not_acknowledged_is_paused_whole() -> None:
    run = Updates()
    run.one.begin_update(1)
    run.spend(1)
    run.one.end_update()
    run.one.begin_update(2)
    run.spend(2)
    run.acknowledge(0, 2)
    run.check(generating=2, paused=1)
    run.one.end_update()
    run.one.begin_update(3)
    run.spend(4)
    update(run.accounts, {}, 100.0)  # it is lost
    assert run.accounts.decided_seconds() == {"generating": 2, "waiting": 0, "paused": 1 + 4, "dead": 0}
    again = engine("a.1")
    update(run.accounts, {"a.1": again}, 100.0)
    run.accounts.acknowledged(again, 0, 9)
    assert run.accounts.seconds() == run.accounts.decided_seconds()


def test_a_server_that_takes_the_account_of_an_unconnected_one_does_not_divide_its_update() -> None:
    run = Updates()
    run.one.begin_update(1)
    run.spend(3)
    run.one.connection = None
    again = engine("a.1")
    give_request(again)
    again.begin_update(1)
    update(run.accounts, {"a.0": run.one, "a.1": again}, 100.0)
    run.accounts.acknowledged(again, 0, 9)
    assert run.accounts.seconds() == {"generating": 0, "waiting": 0, "paused": 3, "dead": 0}


def test_the_seconds_of_an_update_are_in_the_step_in_which_it_is_acknowledged() -> None:
    clock, one = Clock(), engine("a.0")
    history = RunHistory(clock)
    give_request(one)
    one.begin_update(1)
    update(history.engines, {"a.0": one}, 100.0)
    clock.now += 4
    first = history.time_step(0, 0, UpdateTotals())
    clock.now += 2
    history.engines.acknowledged(one, 1, 2)
    second = history.time_step(1, 0, UpdateTotals())
    assert (first["engine_seconds/generating"], first["engine_seconds/paused"]) == (0, 0)
    assert (second["engine_seconds/generating"], second["engine_seconds/paused"]) == (5, 1)


def test_a_step_has_the_mean_pause_of_the_updates_that_ended_in_it() -> None:
    history, updates = RunHistory(Clock()), UpdateTotals()
    updates = updates.plus(3.0, 1.0).plus(5.0, 2.0)
    first = history.time_step(0, 0, updates)
    assert (first["weights/update_seconds"], first["weights/pause_seconds"]) == (4, 1.5)
    assert "weights/pause_seconds" not in history.time_step(1, 0, updates), "no update ended in this step"
    last = history.time_step(2, 0, updates.plus(0.5, 0.25))
    assert (last["weights/update_seconds"], last["weights/pause_seconds"]) == (0.5, 0.25)


@pytest.mark.parametrize("end", ["closed", "removed", "connected again", "heard"])
def test_a_silent_engine_is_dead_from_the_moment_from_which_it_counts_as_silent(end: str) -> None:
    """Silence has no event: its beginning is noticed when the seconds are read, or at the next event."""
    clock, one = Clock(), engine("a.0")
    accounts, connection = EngineSeconds(clock), one.connection
    assert connection is not None
    connection.heard = 900.0
    give_request(one)
    accounts.update([one], {"a.0": one}, 900.0)  # the clock differs from the time of the event loop
    clock.now += 40
    read = end == "heard"
    if read:
        assert accounts.seconds() == {"generating": 15, "waiting": 0, "paused": 0, "dead": 25}
        connection.heard = 940.0
    elif end != "removed":
        one.connection = SimpleNamespace(heard=940.0) if end == "connected again" else None  # type: ignore[assignment]
    accounts.update([] if read else [one], {} if end == "removed" else {"a.0": one}, 940.0)
    clock.now += 7
    generating, dead = (22, 25) if end in ("heard", "connected again") else (15, 32)
    assert accounts.seconds() == {"generating": generating, "waiting": 0, "paused": 0, "dead": dead}


async def test_the_counters_for_prometheus_never_decrease(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(steps=3), tmp_path)
    await world.start()
    world.connect_all()
    world.agents[0].hold = True
    await world.some(20)
    [one] = world.run.engines.by_instance.values()
    assert one.requests
    one.begin_update(99)
    await world.some(5)

    def served() -> dict[str, float]:
        world.run._update_timers()
        [family] = [each for each in RunCollector(world.run).collect() if each.name == "rljob_engine_seconds"]
        return {sample.labels["activity"]: sample.value for sample in family.samples}

    before = served()
    await world.some(5)
    assert served()["paused"] == before["paused"]
    world.run.progress.engines.acknowledged(one, 0.0, 0.0)
    after = served()
    assert all(after[name] >= before[name] for name in before) and after["generating"] > before["generating"]


def test_the_next_server_of_an_engine_takes_its_account() -> None:
    clock = Clock()
    accounts = EngineSeconds(clock)
    first, second, exam = engine("a.0", pod="pod-a"), engine("b.0", pod="pod-b"), engine("c.0", "exam")
    update(accounts, {each.instance: each for each in (first, second, exam)}, 100.0)
    clock.now += 1
    update(accounts, {"c.0": exam}, 100.0)
    clock.now += 2
    again = engine("b.1", pod="pod-b")  # not the account of pod-a, although that was lost first
    update(accounts, {each.instance: each for each in (exam, again)}, 100.0)
    clock.now += 4
    assert accounts.of(again) == {"generating": 0, "waiting": 5, "paused": 0, "dead": 2}
    other = engine("d.0", pod="pod-d")
    update(accounts, {each.instance: each for each in (exam, again, other)}, 100.0)
    assert accounts.of(other) == {"generating": 0, "waiting": 1, "paused": 0, "dead": 6}
    assert [account.name for account in accounts.accounts] == ["main-0", "main-1", "exam-0"]


def test_a_server_takes_the_account_of_one_that_lost_its_connection() -> None:
    clock = Clock()
    accounts, old, new = EngineSeconds(clock), engine("a.0"), engine("a.1")
    update(accounts, {"a.0": old}, 100.0)
    clock.now += 1
    connection, old.connection = old.connection, None
    update(accounts, {"a.0": old, "a.1": new}, 100.0)
    clock.now += 2
    assert (accounts.of(old), sum(accounts.of(new).values())) == ({}, 3)
    old.connection = connection  # it was another engine
    update(accounts, {"a.0": old, "a.1": new}, 100.0)
    assert [account.name for account in accounts.accounts] == ["main-0", "main-1"]
    assert sum(accounts.seconds().values()) == 3


def test_an_engine_that_was_removed_on_purpose_is_not_dead() -> None:
    clock = Clock()
    accounts, one = EngineSeconds(clock), engine("a.0")
    update(accounts, {"a.0": one}, 100.0)
    clock.now += 3
    one.state = "leaving"
    update(accounts, {}, 100.0)
    clock.now += 9
    assert accounts.seconds() == {"generating": 0, "waiting": 3, "paused": 0, "dead": 0}
    update(accounts, {"b.0": engine("b.0")}, 100.0)
    assert [account.name for account in accounts.accounts] == ["main-0", "main-1"]


async def test_steps_status_and_restarted_coordinator_agree(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(steps=3), tmp_path, engines=2)
    await world.start()
    world.connect_all()
    while world.run.version < 2:
        await world.some(1)
    world.kill_coordinator()
    await world.start()
    world.connect_all()
    await world.settle()
    status = status_of(world.run)
    shown = {each.name: each.value for each in status.metrics if each.name.startswith("engine_seconds/")}
    assert shown.keys() == {f"engine_seconds/{activity}" for activity in ENGINE_ACTIVITIES}
    finish(TrackingWriter(tmp_path, tensorboard=False))
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for name, seconds in shown.items():
        assert sum(step[name] for step in steps) <= seconds + 1e-9
    assert sum(step["engine_seconds/generating"] for step in steps) > 0
    agents = [each for each in status.components if each.role == "agent"]
    accounts = world.run.progress.engines.accounts
    assert len(agents) == len(accounts) == 2
    for agent, account in zip(agents, accounts, strict=True):
        end = world.run.progress._until()
        assert sum(agent.seconds.values()) == pytest.approx(end - account.begun)
