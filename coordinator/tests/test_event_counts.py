"""Rejections, evictions, aborts and requeues are counted by reason, once each, over restarts of the coordinator."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from world import FakePeer, job, random_job

from rljob.coordinator import trajectories
from rljob.coordinator.event_counts import EVENTS, REASONS, EventCounts
from rljob.coordinator.status_report import status_of
from rljob.coordinator.tracking import TrackingWriter, finish
from rljob.protocol.agent_protocol import Completion, EngineHeartbeat, GenerationFailed, RequestId
from rljob.protocol.contexts import context_digest
from rljob.protocol.runner_protocol import GenerateRequest
from rljob.scheduling.groups import CAUSES, REJECTED, Ended, make_group


def test_every_cause_of_an_end_is_a_reason_of_one_event() -> None:
    [sample] = make_group("g0", 0, "sums", 0, 1).samples
    counts = EventCounts()
    for end in REJECTED:
        for cause in CAUSES[end]:
            counts.ended([Ended(sample, end, "a sentence", cause)])
    counts.ended([Ended(sample, "trained", "", "")])
    seen = {pair: count for pair, count in counts.counts().items() if count}
    assert set(seen.values()) == {1}
    expected = {(event, reason) for event in ("rejected", "evicted") for reason in REASONS[event]}
    assert set(seen) == expected


def events(world: Any) -> dict[str, int]:
    return status_of(world.run).events


async def test_failures_and_filtered_groups_are_counted_with_their_causes(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(steps=3), tmp_path)
    await world.start()
    world.connect_all()
    world.agents[0].hold = True
    await world.some(20)
    sample = min(world.run.trajectories.by_sample)
    group = world.run.trajectories.by_sample[sample].sample.group
    held = sum(bool(t.engine) for t in world.run.trajectories.by_sample.values() if t.sample.group is group)
    others = len(group.samples) - 1
    world.run.outcomes.failed(world.run.trajectories.by_sample[sample], "broken", "runner")
    assert held
    assert events(world) == {"rejected/runner": 1, "rejected/group_failed": others, "aborted/ended": held}


async def test_requests_of_a_lost_engine_and_samples_of_a_lost_runner_are_requeued(
    new_world: Any, tmp_path: Path
) -> None:
    world = new_world(job(steps=3), tmp_path, engines=2)
    await world.start()
    world.connect_all()
    for agent in world.agents:
        agent.hold = True
    await world.some(20)
    engine = world.run.engines.by_instance[world.agents[0].instance]
    held = len(engine.requests)
    assert held
    world.run.trajectories.lose_engine(engine, "engine_lost")
    assert events(world) == {"requeued/engine_lost": held}
    [runner] = world.run.trajectories.runners
    leased = sum(t.runner is runner for t in world.run.trajectories.by_sample.values())
    world.run.trajectories.lose_runner(runner)
    assert events(world) == {"requeued/engine_lost": held, "requeued/runner_lost": leased}


@pytest.fixture
async def held(new_world: Any, tmp_path: Path) -> Any:
    """A world whose engine holds its requests, and the engine."""
    world = new_world(job(steps=3), tmp_path)
    await world.start()
    world.connect_all()
    world.agents[0].hold = True
    await world.some(20)
    [engine] = world.run.engines.by_instance.values()
    assert len(engine.requests) >= 2
    return world, engine


async def test_an_agent_that_connects_again_holds_other_requests(held: Any) -> None:
    world, engine = held
    requests = len(engine.requests)
    world.run.trajectories.register_engine(engine, [RequestId("g99.0", 0, 0)])
    assert events(world) == {"requeued/not_held": requests, "aborted/not_wanted": 1}


async def test_a_server_that_starts_again_and_a_failed_request_are_requeued(held: Any) -> None:
    world, engine = held
    requests = list(engine.requests)
    world.run.trajectories.returned(engine, RequestId(*requests[0]))
    world.agents[0].say(EngineHeartbeat("starting", 0, 0, 1))
    await world.some(2)
    assert events(world) == {"requeued/engine_failed": 1, "requeued/engine_restarted": len(requests) - 1}


async def test_a_new_lineage_discards_the_request_and_the_sample_gets_another_lease(held: Any) -> None:
    world, engine = held
    world.run.trajectories.start_over(world.run.trajectories.by_sample[next(iter(engine.requests))[0]])
    assert events(world) == {"aborted/discarded": 1, "requeued/new_lineage": 1}


async def test_an_answer_from_an_engine_that_lost_the_request_aborts_it_elsewhere(held: Any) -> None:
    world, engine = held
    key = next(iter(engine.requests))
    turn = world.run.trajectories.by_sample[key[0]].turns[key[1], key[3]]
    context = context_digest(turn.given + turn.token_ids)
    agent = FakePeer("agent")
    agent.instance = "another"
    world.run.trajectories.completed(Completion(RequestId(*key), b"", b"", [], "stop", 0.0, context), agent)
    assert events(world) == {"aborted/elsewhere": 1}


async def test_what_engines_cannot_generate_is_no_failure_of_the_runner(held: Any) -> None:
    world, engine = held
    key = next(iter(engine.requests))
    world.agents[0].say(GenerationFailed(RequestId(*key), "too long", True))
    while not events(world):
        await world.some(1)
    assert events(world)["rejected/generation"] == 1
    other = next(iter(engine.requests))
    early = GenerateRequest(other[0], 7, b"", 4, 1.0, [])
    trajectory = world.run.trajectories.by_sample[other[0]]
    early.lease, early.attempt = trajectory.lease, trajectory.attempts
    world.runner.say(early)
    while "rejected/protocol" not in events(world):
        await world.some(1)
    assert events(world)["rejected/protocol"] == 1


async def test_failed_requests_count_until_an_engine_generates_tokens(
    new_world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trajectories, "FIRST_PAUSE_SECONDS", 0.0)
    world = new_world(job(steps=1, alpha=0, n=1, g=2), tmp_path)
    world.runner.turns_of = lambda sample: 2
    [agent] = world.agents
    agent.hold = True
    await world.start()
    world.connect_all()

    async def fail(sample: str, times: int) -> None:
        for _ in range(times):
            while not (found := [each.request_id for each in agent.queue if each.request_id.sample == sample]):
                await world.some(1)
            agent.queue = [each for each in agent.queue if each.request_id not in found]
            agent.say(GenerationFailed(found[0], "no memory", False))
            await world.some(1)

    await fail("g0.0", 8)
    while "g0.0" not in {each.request_id.sample for each in agent.queue}:
        await world.some(1)
    agent.hold = False
    agent.step()
    agent.step()  # the first turns of both samples
    agent.hold = True
    await fail("g0.0", 8)
    assert events(world) == {"requeued/engine_failed": 16}
    await fail("g0.0", 1)
    assert events(world)["rejected/generation"] == 1


@pytest.mark.parametrize("seed", range(6))
async def test_every_sample_that_is_not_trained_has_one_cause_of_its_end(
    new_world: Any, tmp_path: Path, seed: int
) -> None:
    world = new_world(random_job(random.Random(seed)), tmp_path, engines=2)
    await world.start()
    world.connect_all()
    await world.settle()
    counts = world.run.progress.events.counts()
    of_ends = {end: sum(n for (_, reason), n in counts.items() if reason in CAUSES[end]) for end in REJECTED}
    assert of_ends == {end: world.run.ends[end] for end in REJECTED}
    for row in world.store.query("SELECT DISTINCT state, reason FROM samples WHERE state IN ('surplus', 'expired')"):
        cause = {"the group has": "enough_members", "not needed by": "not_needed", "the run ended": "run_ended",
                 "too old for b": "too_old", "not complete ": "not_complete"}[row["reason"][:13]]  # fmt: skip
        assert counts["evicted", cause]  # type: ignore[index]


async def test_a_request_that_a_weight_update_or_a_drain_interrupts_is_requeued(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(steps=3), tmp_path)
    await world.start()
    world.connect_all()
    [agent] = world.agents
    agent.hold = True
    await world.some(20)
    [engine] = world.run.engines.by_instance.values()

    def interrupt() -> None:
        key = next(iter(engine.requests))
        turn = world.run.trajectories.by_sample[key[0]].turns[key[1], key[3]]
        context = context_digest(turn.given + turn.token_ids)
        completion = Completion(RequestId(*key), b"", b"", [], "abort", 0.0, context)
        world.run.trajectories.completed(completion, engine.connection)

    held = len(engine.requests)
    assert held >= 2
    world.run.trajectories.interrupt(engine)
    interrupt()
    assert events(world) == {"aborted/drained": held, "requeued/interrupted": 1}
    engine.begin_update(99)
    interrupt()
    assert events(world) == {"aborted/drained": held, "requeued/interrupted": 1, "requeued/update": 1}


async def test_the_steps_and_the_status_of_a_restarted_coordinator_have_every_event_once(
    new_world: Any, tmp_path: Path
) -> None:
    world = new_world(job(steps=6, scheduling={"redundancy": {"members": 1}}), tmp_path, engines=2)
    await world.start()
    world.connect_all()
    while world.run.version < 3:
        await world.some(1)
    world.kill_coordinator()
    await world.start()
    world.connect_all()
    await world.settle()
    shown = events(world)
    finish(TrackingWriter(tmp_path, tensorboard=False))
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    of_steps: Counter[str] = Counter()
    for step in steps:
        assert {f"{EVENTS}{event}/{reason}" for event, names in REASONS.items() for reason in names} <= step.keys()
        of_steps.update({name: value for name, value in step.items() if name.startswith(EVENTS) and value})
    assert of_steps and all(shown[name.removeprefix(EVENTS)] >= count > 0 for name, count in of_steps.items())
