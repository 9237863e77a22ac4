"""Rejections, evictions, aborts and requeues are counted by reason, once each, over restarts of the coordinator."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from world import job

from rljob.coordinator.event_counts import EVENTS, REASONS, EventCounts
from rljob.coordinator.status_report import status_of
from rljob.coordinator.tracking import TrackingWriter, finish
from rljob.protocol import messages as m
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
    world.run.outcomes.failed(world.run.trajectories.by_sample[sample], "broken", "runner")
    assert held
    assert events(world) == {
        "rejected/runner": 1, "rejected/group_failed": len(group.samples) - 1, "aborted/ended": held,
    }  # fmt: skip


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
        turn = world.run.trajectories.by_sample[key[0]].turns[key[1]]
        context = m.context_digest(turn.request.prompt + turn.token_ids)
        completion = m.Completion(m.RequestId(*key), b"", b"", [], "abort", 0.0, context)
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
