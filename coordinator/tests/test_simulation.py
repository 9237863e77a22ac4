"""The production coordinator and runner in virtual time: deterministic, and equal to a run in real time."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
from world import job

from rljob.protocol import agent_protocol as m
from rljob.runner.context import Context
from rljob.runner.leased_trajectory import LeasedTrajectory
from rljob.simulation.simulated_engine import EngineModel
from rljob.simulation.simulated_run import SimulatedCluster, SimulatedRun, simulate
from rljob.simulation.virtual_time import StandstillError, run_in_virtual_time

HERE = Path(__file__).parent
ENGINES = [("main", EngineModel(3)), ("main", EngineModel(2, rate=2.0, peak=3.0))]

PRINT_EVENTS = """
import sys
sys.path.insert(0, {here!r})
from test_simulation import ENGINES, cluster, events_of
from world import job
scheduling = {{"redundancy": {{"groups": 1, "members": 1}}}}
events = events_of(job(6, 2, 3, 3, scheduling=scheduling), cluster(ENGINES, work=lambda g: 1 + g.sampling.seed % 7))
print(len(events), *events, sep="\\n")
"""


def cluster(engines: list[tuple[str, EngineModel]], **changes: Any) -> SimulatedCluster:
    settings: dict[str, Any] = {"work": lambda request: 1.0, "train_seconds": lambda batch: 2.5} | changes
    return SimulatedCluster(engines, **settings)


def described(name: str, message: Any) -> str:
    """Return a message without its durations, which differ between runs in real time."""
    match message:
        case m.Completions():
            return f"{name} Completions {[(item.request_id, item.spans, item.finish) for item in message.items]}"
        case m.WeightAck():
            return f"{name} WeightAck {message.update} {message.version} {message.digest}"
    return f"{name} {message}"


def events_of(manifest: Any, around: SimulatedCluster) -> list[str]:
    """Return the messages of a run in virtual time, in order."""
    events: list[str] = []
    simulate(manifest, around, observer=lambda name, frame: events.extend(described(name, each) for each in frame))
    return events


def test_a_run_has_the_same_events_under_every_hash_seed() -> None:
    found = [
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", PRINT_EVENTS.format(here=str(HERE))],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert found[0] == found[1]
    assert int(found[0].split()[0]) > 500


def test_a_run_has_the_same_events_in_virtual_and_in_real_time() -> None:
    """One engine with one slot and α = 0: one thing happens at a time, however slow this machine is."""
    manifest = job(4, 0, 2, 2)
    around = cluster([("main", EngineModel(1))], work=lambda request: 0.02, train_seconds=lambda batch: 0.02)
    real: list[str] = []
    observer = lambda name, frame: real.extend(described(name, each) for each in frame)  # noqa: E731
    outcome = asyncio.run(SimulatedRun(manifest, around, observer=observer).run())
    assert outcome.steps[-1] > 0.4
    assert real == events_of(manifest, around)


def test_times_are_those_of_the_models() -> None:
    """α = 0, one sample in each of two slots: each step takes the longer sample, training and the weight update."""
    manifest = job(3, 0, 1, 2)
    work = {"0": 4.0, "1": 6.0}
    around = cluster(
        [("main", EngineModel(2, rate=2.0, peak=3.0))],
        work=lambda request: work[request.request_id.sample.split(".")[1]],
        train_seconds=lambda batch: 10.0,
        sync_seconds=0.5,
    )
    outcome = simulate(manifest, around)
    # two requests at 1.5 units of work a second until the first ends, then 2 a second; the first update is at time 0
    generation = 4 / 1.5 + 2 / 2
    assert outcome.steps == pytest.approx([(0.5 + generation + 10) * (step + 1) for step in range(3)])
    assert outcome.busy_seconds == pytest.approx(3 * (4 / 1.5 + generation))
    assert outcome.generated == pytest.approx([10.0, 20.0, 30.0])
    assert (outcome.train_seconds, outcome.ages, outcome.ends) == (30.0, [0] * 6, {"trained": 6})


def test_the_work_of_requests_that_run_at_the_end_of_a_step_counts_as_far_as_it_is_done() -> None:
    """α = 1: four requests run all the time, begin after 7 and 14 s, and the first step ends after 10 s."""
    around = cluster([("main", EngineModel(4))], work=lambda request: 7.0, train_seconds=lambda batch: 3.0)
    outcome = simulate(job(3, 1, 2, 2), around)
    assert outcome.steps[:2] == pytest.approx([10.0, 17.0])
    assert outcome.generated[:2] == pytest.approx([4 * 10.0, 4 * 17.0])


def test_an_interrupted_sample_keeps_its_work() -> None:
    """weightSync.inFlight: abort does not lengthen answers; the second part starts after the update."""
    works = {in_flight: _updated_in_flight(in_flight) for in_flight in ("keep", "abort")}
    assert works["keep"].steps == pytest.approx(works["abort"].steps)
    assert max(works["keep"].ages) == max(works["abort"].ages) == 1


def _updated_in_flight(in_flight: str) -> Any:
    manifest = job(4, 1, 2, 2, weightSync={"inFlight": in_flight})
    around = cluster([("main", EngineModel(4))], work=lambda request: 7.0, train_seconds=lambda batch: 3.0)
    return simulate(manifest, around)


def test_the_work_of_a_sample_is_drawn_once_wherever_it_continues() -> None:
    drawn, served = Counter[str](), defaultdict[str, set[str]](set)

    def work(request: m.Generate) -> float:
        drawn[request.request_id.sample] += 1
        return 1.0 + request.sampling.seed % 9

    class Engines:
        def generated(self, engine: str, slot: int, request: m.RequestId, *_: float) -> None:
            served[request.sample].add(engine)

        def updated(self, *_: Any) -> None: ...

        def trained(self, *_: Any) -> None: ...

    manifest = job(8, 2, 4, 4, weightSync={"inFlight": "abort"})
    around = cluster([("main", EngineModel(4))] * 3, work=work, train_seconds=lambda batch: 1.0)
    simulate(manifest, around, recorder=Engines())
    assert any(len(engines) > 1 for engines in served.values())
    assert set(drawn.values()) == {1}


async def _two_turns(context: Context) -> Any:
    first = await context.generate(context.prompt.token_ids)
    await asyncio.sleep(5.0)
    second = await context.generate(context.prompt.token_ids + first.token_ids)
    return await context.score("", second.finish)


def test_a_loop_waits_in_virtual_time_and_a_runner_drives_no_more_than_its_capacity() -> None:
    started: list[str] = []

    async def loop(context: Context) -> Any:
        started.append(context.sample)
        assert len(started) - len(ended) <= 2
        score = await _two_turns(context)
        ended.append(context.sample)
        return score

    ended: list[str] = []
    around = cluster([("main", EngineModel(4))], train_seconds=lambda batch: 0.0, loop=loop, capacity=2)
    outcome = simulate(job(1, 0, 2, 2), around)
    assert outcome.steps == pytest.approx([2 * (1 + 5 + 1)])


def test_a_trajectory_that_ended_is_freed_without_the_garbage_collector(monkeypatch: Any) -> None:
    made, kept = 0, WeakSet[LeasedTrajectory]()
    make = LeasedTrajectory.__init__

    def make_counted(self: LeasedTrajectory, *arguments: Any) -> None:
        nonlocal made
        made += 1
        kept.add(self)
        make(self, *arguments)

    monkeypatch.setattr(LeasedTrajectory, "__init__", make_counted)
    gc.disable()
    try:
        simulate(job(20, 1, 2, 2), cluster(ENGINES))
        assert made >= 20 * 4 and len(kept) <= 3 * 4, "those of a batch and of the bound, at the end of the run"
    finally:
        gc.enable()


def test_turns_and_members_of_a_group_find_their_prefix_while_requests_wait_for_slots() -> None:
    async def three_turns(context: Context) -> Any:
        tokens = context.prompt.token_ids
        for _ in range(3):
            turn = await context.generate(tokens)
            tokens += turn.token_ids
        return await context.score("", turn.finish)

    around = cluster(
        [("main", EngineModel(4))] * 4, work=lambda request: 1 + request.sampling.seed % 9, loop=three_turns
    )
    outcome = simulate(job(4, 3, 8, 4), around)
    assert outcome.members_at_home >= 0.9 and outcome.turns_at_home >= 0.9


def test_samples_are_younger_than_the_bound_where_the_trainer_is_the_slower_part() -> None:
    """Eight samples a step in 1 s each on plenty of slots; a step takes 10 s: a batch waits beside it."""
    around = cluster([("main", EngineModel(8))], train_seconds=lambda batch: 10.0)
    outcome = simulate(job(12, 6, 8, 1), around)
    late = outcome.ages[4 * 8 :]
    assert max(outcome.ages) <= 3 and sum(late) / len(late) < 2.5, "not 6, the bound"
    assert outcome.steps[-1] == pytest.approx(121.0), "and the trainer never waits"


def test_every_sample_ends_once_and_no_sample_is_older_than_the_bound() -> None:
    async def reward(sample: str) -> float:
        group, member = sample[1:].split(".")
        await asyncio.sleep(int(member))
        return float(int(group) % 3 == 0 and int(member) % 2)

    manifest = job(
        5, 1, 2, 2, scheduling={"redundancy": {"groups": 2, "members": 1}}, algorithm={"groupFilter": "nonconstant"}
    )
    around = cluster(ENGINES, work=lambda request: 1 + request.sampling.seed % 5, reward=reward, runners=2)
    outcome = simulate(manifest, around)
    assert max(outcome.ages) <= 1
    assert len(outcome.trained) == len(set(outcome.trained)) == 5 * 2 * 2 == outcome.ends["trained"]
    assert {int(sample[1:].split(".")[0]) % 3 for sample in outcome.trained} == {0}
    assert outcome.ends["filtered"] > 0 and outcome.ends["surplus"] > 0


def test_a_run_that_makes_no_progress_is_an_error() -> None:
    with pytest.raises(StandstillError, match="for 86400 s of virtual time"):
        simulate(job(1, 0, 1, 1), cluster([]))

    async def wait_for_ever() -> None:
        await asyncio.Event().wait()

    with pytest.raises(StandstillError, match="nothing is left to happen"):
        run_in_virtual_time(wait_for_ever())


def test_a_run_that_fails_is_an_error_with_its_reason() -> None:
    async def equal(sample: str) -> float:
        return 0.0

    with pytest.raises(
        RuntimeError,
        match="AllGroupsFiltered: 51 groups in a row were filtered, the last one because the group's rewards are all",
    ):
        simulate(job(1, 0, 1, 2, algorithm={"groupFilter": "nonconstant"}), cluster(ENGINES, reward=equal))


def test_engines_that_reconnect_continue_their_requests() -> None:
    manifest, counts = job(3, 1, 2, 2), Counter[str]()
    simulation = SimulatedRun(
        manifest,
        cluster(ENGINES, work=lambda request: 10.0),
        observer=lambda name, frame: counts.update(type(each).__name__ for each in frame),
    )

    async def program() -> Any:
        running = asyncio.create_task(simulation.run())
        for _ in range(8):
            await asyncio.sleep(3.0)
            for link in simulation.links[:2]:
                link.cut()
                link.connect()
        return await running

    outcome = run_in_virtual_time(program())
    assert len(outcome.trained) == 12
    assert counts["Generate"] == 12  # none was dispatched again
