"""Messages that a correct peer sends rarely or never: repeated, early, late, without a lease, of another context."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import world as world_module
from world import job

from rljob.coordinator import engines as engines_module
from rljob.coordinator.status_report import status_of
from rljob.ledger.payload_record import PayloadRecord
from rljob.ledger.queries import completions
from rljob.protocol.agent_protocol import HEARTBEAT_SECONDS, Abort, Completions, EngineHeartbeat, Generate, RequestId
from rljob.protocol.contexts import context_digest
from rljob.protocol.runner_protocol import (
    AckTrajectories,
    Cancel,
    GenerateRequest,
    GenerateResult,
    LeaseTrajectory,
    RegisterRunner,
    TrajectoryFailed,
    TrajectoryScored,
)
from rljob.protocol.shared_messages import VersionSpan


async def small_world(new_world: Any, tmp_path: Path, engines: int = 1, **options: Any) -> Any:
    """Return a started world with groups of one sample of one turn, whose engines generate nothing yet."""
    world = new_world(job(**{"n": 1, "g": 1, "alpha": 0, "steps": 2, **options}), tmp_path, engines)
    world.runner.turns_of = lambda sample: 1
    await world.start()
    for agent in world.agents:
        agent.hold = True
    world.connect_all()
    return world


async def until(world: Any, condition: Callable[[], object]) -> None:
    """Run until ``condition`` is true."""
    for _ in range(200):
        if condition():
            return
        await world.some(1)
    raise AssertionError("the condition is never true")


def failures(world: Any) -> list[str]:
    """Return the reasons of the failed samples."""
    return [row[0] for row in world.store.query("SELECT reason FROM samples WHERE state = 'failed'")]


async def finish(world: Any) -> None:
    """Let the engines generate, and check that the run finishes."""
    for agent in world.agents:
        agent.hold = False
    await world.settle()
    assert world.run.finished and world.run.failure is None
    world.check_accounts()


async def test_a_result_that_is_requested_again_leaves_only_once_it_is_durable(new_world: Any, tmp_path: Path) -> None:
    world = await small_world(new_world, tmp_path)
    (agent,) = world.agents
    await until(world, lambda: agent.queue)
    agent.say(Completions([world_module.generate_tokens(agent.queue.pop(0), 0, 0)]))
    world.runner._continue("g0.0")
    assert not any(isinstance(message, GenerateResult) for message in world.runner.peer.take())
    await world.store.drain()
    assert [type(message) for message in world.runner.peer.take()] == [GenerateResult, GenerateResult]


async def test_a_score_without_a_finished_turn_fails_its_sample(new_world: Any, tmp_path: Path) -> None:
    world = await small_world(new_world, tmp_path)
    proceed = world.runner._continue

    def score(sample: str) -> None:
        if sample != "g0.0":
            proceed(sample)
        if sample in ("g0.0", "g1.0"):
            lease = world.runner.driving[sample]
            world.runner.say(TrajectoryScored(sample, 1.0, {}, "", int(sample == "g1.0"), lease=lease.lease))

    world.runner._continue = score
    await until(world, lambda: len(failures(world)) == 2)
    assert failures(world) == [
        "it has a reward, but no turn was generated",
        "it has a reward, but turn 0 is not finished",
    ]
    await finish(world)


def asked(world: Any) -> bytes:
    """Return the context of the first request that the first engine holds."""
    return world.agents[0].queue[0].token_ids


async def test_a_runner_without_the_lease_changes_nothing(new_world: Any, tmp_path: Path) -> None:
    """A second runner claims the sample with no lease, an old one, or the one of the first runner; then it gets the
    lease, and the first runner's messages no longer count."""
    world = await small_world(new_world, tmp_path)
    await until(world, lambda: world.agents[0].queue)
    (first,) = world.runner.driving.values()
    other = world_module.Runner(world)
    other.lives, other.peer = 7, world_module.FakePeer("runner")
    for lease in (0, first.lease - 1, first.lease):
        other.say(RegisterRunner("runner.7", 1000, {"g0.0": lease}))
        other.say(GenerateRequest("g0.0", 0, world_module.int32([9, 9, 9]), 16, 1.0, [0], 0, lease))
        other.say(TrajectoryFailed("g0.0", "broken", 0, lease))
        answers = other.peer.take()
        assert answers == [Cancel(["g0.0"])] * 2
    world.runner.disconnect()
    await until(world, lambda: other.peer._outbox)
    second = next(message for message in other.peer.take() if isinstance(message, LeaseTrajectory))
    assert second.lease > first.lease and second.sample == "g0.0"
    world.runner.connect()
    world.runner.say(TrajectoryScored("g0.0", 1.0, {}, "", 0, 0, [], first.lease))
    assert Cancel(["g0.0"]) in world.runner.peer.take()
    world.router.lost(other.peer)
    world.runner.driving.clear()
    await finish(world)
    (record,) = completions(world.store, "g0.0", 0)
    assert record.given == world_module.int32([0, 1, 2]) and not failures(world)


def of_older_lease(lease: LeaseTrajectory, kind: type) -> Any:
    """Return a message that would change the sample if its lease were the newest."""
    attempt, older = lease.attempt, lease.lease - 1
    return {
        GenerateRequest: GenerateRequest(lease.sample, 0, world_module.int32([9, 9]), 16, 1.0, [0], attempt, older),
        TrajectoryScored: TrajectoryScored(lease.sample, 100.0, {}, "old", 1, attempt, [], older),
        TrajectoryFailed: TrajectoryFailed(lease.sample, "it broke", attempt, older),
    }[kind]


@pytest.mark.parametrize("kind", [GenerateRequest, TrajectoryScored, TrajectoryFailed])
@pytest.mark.parametrize("generated", [False, True])
async def test_a_message_of_an_older_lease_of_the_same_runner_changes_nothing(
    new_world: Any, tmp_path: Path, kind: type, generated: bool
) -> None:
    """The runner holds the sample by a newer lease, and its attempt is the same. ``generated``: its turn is, too."""
    world = await small_world(new_world, tmp_path)
    agent, handle = world.agents[0], world.runner.handle
    await until(world, lambda: agent.queue)
    (lease,) = world.runner.driving.values()
    if generated:
        world.runner.handle = lambda message: None  # its score comes later
        agent.say(Completions([world_module.generate_tokens(agent.queue.pop(0), 0, 0)]))
        await world.some(3)
        assert world.store.query("SELECT 1 FROM completions WHERE finish = 'stop'")
        world.runner.handle = handle
    before = world.run.trajectories.by_sample[lease.sample]
    world.runner.peer.take()
    world.runner.say(of_older_lease(lease, kind))
    await world.store.drain()
    expected = [] if kind is GenerateRequest else [AckTrajectories([lease.sample])]
    assert world.runner.peer.take() == expected, "no Cancel: the message crossed the newer lease"
    assert world.run.trajectories.by_sample.get(lease.sample) is before and before.runner is world.runner.peer
    assert [tuple(row) for row in world.store.query("SELECT state, reward FROM samples")] == [("admitted", None)]
    world.runner._continue(lease.sample)
    await finish(world)
    assert not failures(world) and not world.store.query("SELECT 1 FROM samples WHERE reward = 100.0")
    (record,) = completions(world.store, lease.sample, 0)
    assert record.given == world_module.int32([0, 1, 2])


async def test_after_a_restart_of_the_coordinator_the_newest_lease_counts(new_world: Any, tmp_path: Path) -> None:
    world = await small_world(new_world, tmp_path)
    await until(world, lambda: world.agents[0].queue)
    (old,) = world.runner.driving.values()
    other = world_module.Runner(world)
    other.lives, other.peer = 7, world_module.FakePeer("runner")
    other.say(RegisterRunner("runner.7", 1000, {}))
    world.runner.disconnect()
    await until(world, lambda: other.peer._outbox)
    new = next(message for message in other.peer.take() if isinstance(message, LeaseTrajectory))
    world.kill_coordinator()
    await world.start()
    world.runner.peer, other.peer = world_module.FakePeer("runner"), world_module.FakePeer("runner")
    world.runner.say(RegisterRunner("runner.0", 1, {"g0.0": old.lease}))
    other.say(RegisterRunner("runner.7", 1, {"g0.0": new.lease}))
    assert world.runner.peer.take() == [Cancel(["g0.0"])] and not other.peer._outbox
    world.runner.say(RegisterRunner("runner.0", 1, {"g0.0": old.lease}))
    assert world.runner.peer.take() == [Cancel(["g0.0"])]
    world.router.lost(other.peer)
    world.runner.disconnect()
    world.runner.driving.clear()
    await world.some(2)
    world.connect_all()
    await until(world, lambda: world.runner.driving)
    assert world.runner.driving["g0.0"].lease > new.lease > old.lease
    await finish(world)


@pytest.mark.parametrize("restarted", [False, True])
async def test_tokens_never_get_another_context_than_they_were_generated_from(
    new_world: Any, tmp_path: Path, restarted: bool
) -> None:
    """The runner asks again with another context while the engine generates; after a restart of the coordinator, only
    the engine knows the first context."""
    world = await small_world(new_world, tmp_path)
    await until(world, lambda: world.agents[0].queue)
    assert asked(world) == world_module.int32([0, 1, 2])
    if restarted:
        world.kill_coordinator()
        await world.start()
        world.runner.reborn()
    else:
        world.runner.disconnect()
        world.runner.reborn()
    world.runner.prompt = lambda lease: [9, 9, 9, lease.row]
    world.connect_all()
    if restarted:
        await world.some(5)
    else:
        await until(world, lambda: failures(world))
    await finish(world)
    assert failures(world) == [
        "turn 0 was generated from another context than it has now; a loop that runs again must make the same calls"
    ]
    records = [r for row in world.store.query("SELECT id FROM samples") for r in completions(world.store, row[0], 0)]
    assert records and all(record.context == context_digest(record.given) for record in records)


async def test_a_second_request_before_the_first_turn_is_finished_fails_the_sample(
    new_world: Any, tmp_path: Path
) -> None:
    world = await small_world(new_world, tmp_path)
    for turn in (1, 2):
        await until(world, lambda: world.agents[0].queue)
        (lease,) = world.runner.driving.values()
        world.runner.say(world_module.generate_request(lease, turn, asked(world), world_module.int32([turn])))
        await until(world, lambda turn=turn: len(failures(world)) == turn)
    assert "requests turn 1 before another turn is finished" in failures(world)[0]
    await finish(world)


async def test_what_a_lost_engine_finished_is_taken_from_the_engine_that_repeats_it(
    new_world: Any, tmp_path: Path
) -> None:
    world = await small_world(new_world, tmp_path, engines=2)
    await until(world, lambda: any(agent.queue for agent in world.agents))
    first, second = sorted(world.agents, key=lambda agent: not agent.queue)
    generate = first.queue.pop(0)
    completion = world_module.generate_tokens(generate, 0, 0)
    first.unacknowledged[msgspec.structs.astuple(generate.request_id)] = completion
    first.disconnect()
    await until(world, lambda: second.queue)
    first.connect()
    await until(world, lambda: world.store.query("SELECT 1 FROM completions"))
    await world.some(2)
    assert not second.queue, "its slot is free in the engine, not only in the scheduler"
    assert [tuple(row) for row in world.store.query("SELECT sample, engine FROM completions")] == [
        ("g0.0", first.instance)
    ]
    assert not first.unacknowledged
    await finish(world)


async def test_the_samples_of_a_lost_runner_are_leased_in_order_of_admission(new_world: Any, tmp_path: Path) -> None:
    """Not in the order of a set, which differs from process to process."""
    world = await small_world(new_world, tmp_path, n=8, g=4)
    await until(world, lambda: len(world.runner.driving) == 32)
    taken = list(world.runner.driving)
    assert taken == [f"g{group}.{member}" for group in range(8) for member in range(4)]
    running = [generate.request_id for generate in world.agents[0].queue]
    world.runner.disconnect()
    await world.some(2)
    world.runner.reborn()
    world.runner.connect()
    await until(world, lambda: len(world.runner.driving) == 32)
    assert list(world.runner.driving) == taken
    aborts = []
    world.agents[0].handle = lambda message: aborts.append(message) if isinstance(message, Abort) else None
    unknown = [RequestId(f"g{number}.0", 9, 0) for number in range(100, 130)]
    world.agents[0].say(msgspec.structs.replace(world.agents[0].hello(), running=[*running, *unknown]))
    await until(world, lambda: aborts)
    assert [request_id for abort in aborts for request_id in abort.request_ids] == unknown


async def test_a_silent_agent_gets_no_requests_until_it_is_heard_again(new_world: Any, tmp_path: Path) -> None:
    world = await small_world(new_world, tmp_path, n=4, g=2)
    (agent,) = world.agents
    await until(world, lambda: len(agent.queue) == 8)
    agent.queue.clear()
    agent.peer.heard -= 3 * HEARTBEAT_SECONDS + 1
    (engine,) = world.run.engines.by_instance.values()
    world.run.silent.watch(engine, agent.peer.heard)  # as if the time had passed
    world.run.trajectories.lose_engine(engine, "engine_lost")
    await world.some(5)
    assert not agent.queue and len(world.run.trajectories.queue) == 8
    (component,) = (c for c in status_of(world.run).components if c.role == "agent")
    assert (component.state, component.message) == (
        "silent",
        "its agent has been silent for 16 s; it gets no requests",
    )
    agent.say(EngineHeartbeat("ready", 0, 0, 0))
    await until(world, lambda: agent.queue)
    await finish(world)


async def test_the_status_names_the_sample_and_the_engine_that_a_batch_waits_for(
    new_world: Any, tmp_path: Path
) -> None:
    world = await small_world(new_world, tmp_path)
    (agent,) = world.agents
    await until(world, lambda: agent.queue)
    assert status_of(world.run).message == ""
    (trajectory,) = world.run.trajectories.by_sample.values()
    waits = "batch 0 waits for group g0: sample g0.0"
    trajectory.since -= 312
    assert status_of(world.run).message == f"{waits} has been generated by engine engine-0.0 for 312 s"
    agent.peer.heard -= 20
    expected = f"{waits} has been generated by engine engine-0.0 (its agent has been silent for 20 s) for 312 s"
    assert status_of(world.run).message == expected
    agent.say(Completions([world_module.generate_tokens(agent.queue.pop(0), 0, 0)]))
    await world.store.drain()
    trajectory.since -= 100
    expected = f"{waits} has been in its loop or reward at runner runner.0 for 100 s"
    assert status_of(world.run).message == expected
    await finish(world)
    assert status_of(world.run).message == ""


# --- contexts that are sent as what they add ---


def watch(agent: Any) -> list[Generate]:
    """Return a list that gets every request that arrives at an agent."""
    requests: list[Generate] = []
    handle = agent.handle

    def receive(message: Any) -> None:
        if isinstance(message, Generate):
            requests.append(message)
        handle(message)

    agent.handle = receive
    return requests


def records_of(world: Any) -> dict[str, list[PayloadRecord]]:
    """Return the payload records of every sample."""
    samples = [row[0] for row in world.store.query("SELECT id FROM samples ORDER BY id")]
    return {sample: completions(world.store, sample, 0) for sample in samples}


async def test_a_later_turn_brings_the_engine_only_what_it_adds(new_world: Any, tmp_path: Path) -> None:
    world = await small_world(new_world, tmp_path, steps=1)
    world.runner.turns_of = lambda sample: 3
    requests = watch(world.agents[0])
    await finish(world)
    first, second, third = requests
    (records,) = records_of(world).values()
    assert [record.given for record in records] == [first.token_ids, second.token_ids, third.token_ids]
    assert [first.token_ids, second.token_ids] == [world_module.int32([0, 1, 2]), world_module.observation(0)]
    context = b""
    for request, record in zip(requests, records, strict=True):
        assert 4 * request.prefix_tokens == len(context)
        context += record.given
        assert record.context == context_digest(context) and request.context in ("", record.context)
        context += record.token_ids


@pytest.mark.parametrize("kept", ["nothing", "of another turn", "some"])
async def test_agents_that_lack_prefixes_get_whole_contexts_and_the_tokens_are_the_same(
    new_world: Any, tmp_path: Path, kept: str
) -> None:
    worlds = []
    for number, lacking in enumerate((False, True)):
        (tmp_path / str(number)).mkdir()
        world = await small_world(new_world, tmp_path / str(number), engines=2, n=2, g=4)
        worlds.append(world)
        world.runner.turns_of = world_module.turns_of
        for agent in world.agents if lacking else ():
            keep, calls = agent.contexts.keep, itertools.count()

            def lose(sample: str, token_ids: bytes, keep: Any = keep, calls: Any = calls) -> None:
                if kept == "of another turn":
                    keep(sample, bytes(4) + token_ids[4:])
                elif kept == "some" and next(calls) % 2:
                    keep(sample, token_ids)

            agent.contexts.keep = lose
        await finish(world)
        assert any(agent.missing for agent in world.agents) == lacking and not failures(world)
    assert records_of(worlds[0]) == records_of(worlds[1])


async def test_contexts_of_samples_that_ended_or_moved_are_forgotten(
    new_world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines_module, "FORGOTTEN_TOGETHER", 1)
    world = await small_world(new_world, tmp_path, engines=2, n=2, g=4)
    world.runner.turns_of = world_module.turns_of
    for agent in world.agents:
        agent.hold = False
    await until(world, lambda: world.store.query("SELECT 1 FROM completions WHERE turn = 0 AND finish = 'stop'"))
    world.agents[0].disconnect()
    await finish(world)
    assert world.agents[1].contexts._kept == {}
    world.agents[0].connect()
    await world.settle()
    assert not world.agents[1].contexts._bytes


@pytest.mark.parametrize("moved", [False, True])
async def test_an_interrupted_turn_continues_without_tokens_that_its_engine_has(
    new_world: Any, tmp_path: Path, moved: bool
) -> None:
    world = await small_world(new_world, tmp_path, engines=2, steps=1)
    world.runner.turns_of = lambda sample: 2
    await until(world, lambda: any(agent.queue for agent in world.agents))
    for turn in range(2):
        first, second = sorted(world.agents, key=lambda agent: not agent.queue)
        arriving = watch(second if moved else first)
        request = first.queue.pop(0)
        completion = world_module.generate_tokens(request, 0, 0)
        tokens = completion.token_ids[:8]
        part = msgspec.structs.replace(
            completion, token_ids=tokens, logprobs=bytes(len(tokens)), finish="abort",
            spans=[VersionSpan(0, 0, len(tokens) // 4)],
        )  # fmt: skip
        first.contexts.keep(RequestId("g0.0", 0, 0), request.token_ids + tokens)
        if moved:
            world.run.engines.by_instance[first.instance].state = "leaving"
        first.say(Completions([part]))
        await until(world, lambda arriving=arriving: arriving)
        whole = request.token_ids + tokens
        sent = (arriving[0].prefix_tokens, arriving[0].token_ids)
        assert sent == ((0, whole) if moved else (len(whole) // 4, b""))
        world.run.engines.by_instance[first.instance].state = "ready"
        holder = second if moved else first
        holder.hold = False
        await until(world, lambda: world.store.query("SELECT 1 FROM completions WHERE finish = 'stop'"))
        holder.hold = True
        if not turn:
            await until(world, lambda: any(agent.queue for agent in world.agents))
    await finish(world)
    (records,) = records_of(world).values()
    given = [world_module.int32([0, 1, 2]), b"", world_module.observation(0), b""]
    assert [record.given for record in records] == given
    ((prompt_tokens, total),) = world.store.query("SELECT prompt_tokens, total_tokens FROM samples")
    assert (prompt_tokens, total) == (3, sum(len(r.given) + len(r.token_ids) for r in records) // 4)


@pytest.mark.parametrize("change", [{"prefix_tokens": 0, "prefix": ""}, {"prefix_tokens": 3}, {"prefix": "0" * 32}])
async def test_a_turn_that_does_not_continue_the_turn_before_fails_its_sample(
    new_world: Any, tmp_path: Path, change: dict[str, Any]
) -> None:
    world = await small_world(new_world, tmp_path)
    world.runner.turns_of = lambda sample: 2
    say = world.runner.say

    def falsify(*messages: Any) -> None:
        wrong = [isinstance(each, GenerateRequest) and each.turn == 1 for each in messages]
        say(*(msgspec.structs.replace(e, **change) if w else e for e, w in zip(messages, wrong, strict=True)))
        if any(wrong):
            world.runner.say = say

    world.runner.say = falsify
    await finish(world)
    assert failures(world) == [
        "the context of turn 1 does not continue the turn before; a context is the context and the answer of the turn "
        "before, and an observation"
    ]


@pytest.mark.parametrize("given", [b"", b"abc"])
async def test_a_prompt_that_is_no_token_ids_fails_its_sample(new_world: Any, tmp_path: Path, given: bytes) -> None:
    world = await small_world(new_world, tmp_path)
    say = world.runner.say

    def falsify(*messages: Any) -> None:
        world.runner.say = say
        say(*(msgspec.structs.replace(each, given=given) for each in messages))

    proceed = world.runner._continue

    def first_is_wrong(sample: str) -> None:
        if sample == "g0.0":
            world.runner.say = falsify
        proceed(sample)

    world.runner._continue = first_is_wrong
    await finish(world)
    assert failures(world) == ["the context of turn 0 is not the bytes of at least one int32 token id"]


async def test_an_answer_from_another_prefix_fails_its_sample(new_world: Any, tmp_path: Path) -> None:
    """An agent that does not check the digest of what it was asked for."""
    world = await small_world(new_world, tmp_path)
    world.runner.turns_of = lambda sample: 2
    (agent,) = world.agents
    whole = agent.contexts.whole

    def other(request: Generate) -> Generate:
        found = whole(request)
        if request.prefix_tokens and not failures(world):
            changed = bytes(4) + found.token_ids[4:]
            return msgspec.structs.replace(found, token_ids=changed, context=context_digest(changed))
        return found

    agent.contexts.whole = other
    agent.hold = False
    await until(world, lambda: failures(world))
    assert failures(world) == [
        "turn 1 was generated from another context than it has now; a loop that runs again must make the same calls"
    ]
    await finish(world)
