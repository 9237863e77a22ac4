"""The coordinator with all components in one process: runs end, kills lose nothing, α = 0 is synchronous."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import world as world_module

from rljob.coordinator.status_report import status_of
from rljob.protocol.agent_protocol import Completions, EngineCrashed, EngineHeartbeat, Generate
from rljob.protocol.runner_protocol import AckTrajectories, TrajectoryFailed, TrajectoryScored
from rljob.protocol.shared_messages import Reject
from rljob.protocol.trainer_protocol import StepDone, TrainerBlocked

job = world_module.job


@pytest.mark.parametrize("alpha", [0, 1, 2])
async def test_a_run_ends_with_everything_accounted_for(new_world: Any, tmp_path: Path, alpha: int) -> None:
    world = new_world(job(alpha=alpha, evaluation={"problems": 5, "everySteps": 2}), tmp_path, engines=2)
    await world.start()
    world.connect_all()
    await world.settle()
    assert world.run.finished
    world.check_accounts()
    assert [r.version for r in world.run.evaluations.results] == [0, 2, 4]
    assert world.trainer.step_ == 4 and max(world.trainer.saved) == 4


VICTIMS = ["coordinator", "runner", "engine", "agent", "trainer", "agent's connection", "trainer's connection"]


async def inject_fault(world: Any, victim: str) -> None:
    """Kill a component, or cut its connection, and let it reconnect."""
    match victim:
        case "coordinator":
            world.kill_coordinator()
            await world.start()
        case "runner":
            world.runner.disconnect()
            world.runner.reborn()
        case "engine":
            world.agents[0].reborn()
            if world.agents[0].peer is not None:
                world.agents[0].say(world.agents[0].hello())
        case "agent":
            world.agents[0].disconnect()
            world.agents[0].reborn()
        case "trainer":
            world.trainer.disconnect()
            world.trainer.reborn()
        case "agent's connection":
            world.agents[0].disconnect()
        case "trainer's connection":
            world.trainer.disconnect()
    world.connect_all()


def check_replays(world: Any) -> None:
    """Assert that a replayed batch equals the first one."""
    first = {step: data for step, data in reversed(world.trainer.batches)}
    assert all(first[step] == data for step, data in world.trainer.batches)


@pytest.mark.parametrize("alpha", [0, 1])
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("after", range(0, 60, 3))
async def test_a_fault_of_one_component_loses_nothing(
    new_world: Any, tmp_path: Path, victim: str, alpha: int, after: int
) -> None:
    world = new_world(job(alpha=alpha), tmp_path)
    await world.start()
    world.connect_all()
    await world.some(after)
    await inject_fault(world, victim)
    await world.settle()
    assert world.run.finished
    world.check_accounts()
    check_replays(world)


@pytest.mark.parametrize("seed", range(60))
async def test_many_consecutive_faults_lose_nothing(new_world: Any, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    world = new_world(world_module.random_job(rng), tmp_path, engines=rng.choice([1, 2]))
    world.commit_turns = lambda: rng.choice([0, 0, 1, 3])
    await world.start()
    world.connect_all()
    for _ in range(rng.randrange(2, 12)):
        for agent in world.agents:
            agent.hold = rng.random() < 0.3  # its requests span weight updates
        await world.some(rng.randrange(12))
        await inject_fault(world, rng.choice(VICTIMS))
    for agent in world.agents:
        agent.hold = False
    await world.settle()
    assert world.run.finished
    world.check_accounts()
    check_replays(world)


@pytest.mark.parametrize("alpha", [0, 1])
async def test_killing_the_coordinator_repeatedly_loses_nothing(new_world: Any, tmp_path: Path, alpha: int) -> None:
    world = new_world(job(alpha=alpha, steps=6, evaluation={"problems": 3}), tmp_path, engines=2)
    await world.start()
    for turn in range(40):
        world.connect_all()
        await world.some(turn % 7)
        world.kill_coordinator()
        await world.start()
    world.connect_all()
    await world.settle()
    assert world.run.finished
    world.check_accounts()


async def test_a_request_that_outlives_an_update_and_the_coordinator_keeps_its_age(
    new_world: Any, tmp_path: Path
) -> None:
    world = new_world(job(alpha=1, n=1, g=1, steps=5), tmp_path, engines=2)
    await world.start()
    world.connect_all()
    slow = world.agents[0]
    slow.hold = True
    while world.run.version < 1 or slow.version < 1:
        await world.some(1)
    assert slow.queue, "it holds a request of version 0"
    world.kill_coordinator()
    await world.start()
    for part in (world.trainer, slow, world.runner, world.agents[1]):
        part.connect()
        await world.some(10)
    assert world.run.version == 1, "batch 1 waits: it is the last batch that the sample may join"
    slow.hold = False
    await world.settle()
    assert world.run.finished
    world.check_accounts()
    assert not world.store.query("SELECT 1 FROM samples WHERE state = 'expired'")


async def test_a_restarted_coordinator_still_verifies_the_trainer(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(alpha=0, steps=5), tmp_path)
    await world.start()
    world.connect_all()
    while world.run.weights.published < 3:
        await world.some(1)
    world.trainer.disconnect()
    world.trainer.reborn()
    world.trainer.drift = "other"
    world.trainer.connect()
    while world.trainer.incarnation == 0:
        await world.some(1)
    world.kill_coordinator()
    await world.start()
    world.connect_all()
    await world.settle()
    assert world.run.weights.lineage == 1 and world.run.finished


async def test_the_requests_of_a_restarting_engine_go_to_others(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(alpha=0, n=4), tmp_path, engines=2)
    await world.start()
    world.connect_all()
    for agent in world.agents:
        agent.hold = True
    while not all(agent.queue for agent in world.agents):
        await world.some(1)
    dead, other = world.agents
    dead.queue.clear()
    dead.say(EngineHeartbeat("starting", 0, 0, 1))
    other.hold = False
    await world.settle()
    assert world.run.finished, "no request waits for the starting engine"


async def test_an_engine_that_reconnected_is_not_removed_for_an_earlier_loss(new_world: Any, tmp_path: Path) -> None:
    """Two losses in quick succession: the second grace period ends after the engine has reconnected."""
    world = new_world(job(), tmp_path)
    await world.start()
    world.connect_all()
    await world.some(3)
    (lost,) = world.run.engines.by_instance.values()
    world.agents[0].disconnect()
    world.router.engines.forget(lost)
    world.agents[0].connect()
    world.router.engines.forget(lost)
    await world.settle()
    world.check_accounts()


async def test_the_status_reports_why_an_engine_server_crashed(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(), tmp_path)
    await world.start()
    agent = world.agents[0]
    agent.hello = lambda: EngineCrashed("main", "it was killed by SIGKILL", "last words", 2, True)
    agent.connect()
    status = status_of(world.run)
    assert [(p.role, p.instance, p.state, p.restarts, p.message) for p in status.components] == [
        ("agent", "main", "starting", 2, "it was killed by SIGKILL")
    ]
    assert "an engine and a runner to connect; pool main: it was killed by SIGKILL" in status.message
    agent.say(type(agent).hello(agent))
    (component,) = status_of(world.run).components
    assert (component.instance, component.state, component.message) == (
        agent.instance,
        "ready",
        "it was killed by SIGKILL",
    )
    agent.disconnect()
    assert status_of(world.run).components == []


async def test_the_status_reports_why_the_trainer_is_blocked(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(), tmp_path)
    await world.start()
    world.connect_all()
    await world.some(2)
    incarnation = world.run.trainer.session.incarnation
    world.trainer.say(TrainerBlocked(incarnation, "the disk of /x is full"))
    assert status_of(world.run).message == "the trainer waits: the disk of /x is full"
    assert [p.message for p in status_of(world.run).components if p.role == "trainer"] == ["the disk of /x is full"]
    world.trainer.say(TrainerBlocked(incarnation, ""))
    assert status_of(world.run).message == ""


async def test_a_defect_ends_the_run_with_a_reason(new_world: Any, tmp_path: Path, monkeypatch: Any) -> None:
    world = new_world(job(), tmp_path)
    await world.start()
    monkeypatch.setattr(world.run.scheduler, "admissible", lambda: 1 // 0)
    world.connect_all()
    await world.some(3)
    assert world.run.failure is not None and world.run.failure[0] == "InternalError"


@pytest.mark.parametrize("role", ["runner", "agent", "trainer"])
async def test_a_defect_in_the_loss_of_a_peer_ends_the_run_with_a_reason(
    new_world: Any, tmp_path: Path, monkeypatch: Any, role: str
) -> None:
    """The loss of a runner or an engine takes effect later, when no message is handled."""
    world = new_world(job(), tmp_path)
    await world.start()
    world.connect_all()
    await world.some(3)
    owner, name, component = {
        "runner": (world.run.trajectories, "lose_runner", world.runner),
        "agent": (world.router.engines, "forget", world.agents[0]),
        "trainer": (world.run.trainer, "lose", world.trainer),
    }[role]
    monkeypatch.setattr(owner, name, lambda lost: 1 // 0)
    component.disconnect()
    await world.some(3)
    assert world.run.failure is not None and world.run.failure[0] == "InternalError"
    assert "ZeroDivisionError" in world.run.failure[1]


async def test_timing_does_not_change_the_batches_at_alpha_zero(new_world: Any, tmp_path: Path) -> None:
    tasks = [
        {"name": name, "weight": weight, "data": {"reasoningGym": {"dataset": "chain_sum"}}, "reward": "r"}
        for name, weight in (("sums", 1.0), ("more", 2.0))
    ]

    async def batches(name: str, engines: int, kill: bool) -> list[tuple[int, bytes]]:
        (tmp_path / name).mkdir()
        world = new_world(
            job(alpha=0, steps=5, n=3, algorithm={"groupFilter": "nonconstant"}, tasks=tasks), tmp_path / name, engines
        )
        await world.start()
        world.connect_all()
        if kill:
            for turns in (12, 7, 30, 41):
                await world.some(turns)
                world.kill_coordinator()
                await world.start()
                world.connect_all()
        await world.settle()
        world.check_accounts()
        return world.trainer.batches

    one = await batches("one", 1, False)
    assert one == await batches("three", 3, False) == await batches("killed", 2, True)


async def test_a_trainer_that_does_not_reproduce_its_weights_starts_a_new_lineage(
    new_world: Any, tmp_path: Path
) -> None:
    world = new_world(job(alpha=0, steps=5), tmp_path)
    await world.start()
    world.connect_all()
    while world.run.version < 3 or world.run.weights.published < 3:
        await world.some(1)
    world.trainer.disconnect()
    world.trainer.reborn()
    world.trainer.drift = "other"
    world.trainer.connect()
    await world.settle()
    assert world.run.weights.lineage == 1
    world.check_accounts()


async def test_a_reward_for_a_response_of_the_old_lineage_is_ignored(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(alpha=0, steps=3), tmp_path)
    await world.start()
    world.connect_all()
    while world.run.weights.published < 1:
        await world.some(1)
    scores, send = [], world.runner.say
    world.runner.say = lambda message: (scores.append if isinstance(message, TrajectoryScored) else send)(message)
    while not scores:
        await world.some(1)
    world.trainer.disconnect()
    world.trainer.reborn()
    world.trainer.drift = "other"
    world.trainer.connect()
    while world.run.weights.lineage == 0:
        for part in (world.trainer, *world.agents):
            part.step()
        await world.store.drain()
    world.runner.say = send
    for message in scores:
        send(message)
    assert all(sample.reward is None for group in world.run.scheduler.groups.values() for sample in group.samples)
    await world.settle()
    assert world.run.finished
    world.check_accounts()


async def test_messages_about_an_old_attempt_are_acknowledged_and_ignored(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(alpha=0, steps=2), tmp_path)
    await world.start()
    world.connect_all()
    scores, send = [], world.runner.say
    world.runner.say = lambda message: (scores.append if isinstance(message, TrajectoryScored) else send)(message)
    await world.settle()
    trajectories = list(world.run.trajectories.by_sample.values())
    assert trajectories and len(scores) == len(trajectories), "all responses wait for their rewards"
    stale = [msgspec.structs.replace(score, reward=100.0) for score in scores]
    for trajectory in trajectories:
        world.run.trajectories.start_over(trajectory)
    world.run.changed()
    await world.settle()
    assert all(turn.finished for t in trajectories for turn in t.turns.values()), "there are new responses"
    world.runner.say = send
    failed = [TrajectoryFailed(s.sample, "it broke", s.attempt, s.lease) for s in stale]
    world.runner.say(*stale, *failed)
    await world.store.drain()
    assert {s for ack in world.runner.peer.take() if isinstance(ack, AckTrajectories) for s in ack.samples}
    assert all(trajectory.sample.open for trajectory in trajectories)
    world.runner.disconnect()
    world.runner.reborn()
    world.runner.connect()
    await world.settle()
    assert world.run.finished
    world.check_accounts()
    assert not world.store.query("SELECT 1 FROM samples WHERE reward = 100.0 OR state = 'failed'")


async def test_an_engine_whose_digest_differs_gets_no_work_and_is_restarted(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(), tmp_path)
    world.agents[0].wrong_digest = "something else"
    await world.start()
    world.connect_all()
    for _ in range(30):
        await world.some(1)
        if world.agents[0].lives:
            break
    assert world.agents[0].lives == 1 and world.run.version == 0
    assert world.run.trajectories.generated_tokens == 0
    world.agents[0].wrong_digest = ""
    await world.settle()
    assert world.run.finished


@pytest.mark.parametrize(
    ("dtype", "probe", "sentence"),
    [
        ("float32", (2e-4, 1e-5), "by up to 0.0002 nats (spec.weightSync.probeTolerance is 0.0001);"),
        ("bfloat16", (0.09, 0.0036), ""),
        ("bfloat16", (0.4, 0.05), "by a mean of 0.05 nats (spec.weightSync.bfloat16Tolerance.mean is 0.03);"),
        ("bfloat16", (0.64, 0.27), "bfloat16Tolerance.max is 0.5) and probe tokens differ by a mean of 0.27 nats"),
        ("bfloat16", (math.nan, math.nan), "by up to nan nats"),
    ],
)
async def test_an_engine_whose_probe_differs_ends_the_run_in_every_dtype(
    new_world: Any, tmp_path: Path, dtype: str, probe: tuple[float, float], sentence: str
) -> None:
    world = new_world(job(trainer={"dtype": dtype}), tmp_path)
    world.agents[0].probe = probe
    await world.start()
    world.connect_all()
    await world.settle()
    assert world.run.finished != bool(sentence)
    if sentence:
        reason, message = world.run.failure
        assert reason == "LogprobMismatch" and sentence in message
        assert "computes other log-probabilities than the trainer from the same weights" in message


async def test_an_old_incarnation_is_rejected(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(), tmp_path)
    await world.start()
    world.connect_all()
    await world.some(3)
    old = world.trainer
    world.trainer = world_module.Trainer(world)
    world.trainer.connect()
    await world.some(2)
    before = world.run.version
    old.say(StepDone(1, before, {}))
    assert world.run.version == before
    assert any(isinstance(message, Reject) for message in old.peer.take())
    await world.settle()
    world.check_accounts()


async def test_rewards_that_never_differ_end_the_run_with_a_reason(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(algorithm={"groupFilter": "nonconstant"}), tmp_path)
    world.reward = lambda sample, result: 1.0
    await world.start()
    world.connect_all()
    await world.settle(100_000)
    assert world.run.failure is not None and world.run.failure[0] == "AllGroupsFiltered"


@pytest.mark.parametrize("before", [0, 300], ids=["counted", "counted before"])
async def test_a_task_without_accepted_groups_is_named_and_the_others_continue(
    new_world: Any, tmp_path: Path, before: int
) -> None:
    common = {"data": {"reasoningGym": {"dataset": "chain_sum"}}, "reward": "r"}
    tasks = [{"name": "sums", **common}, {"name": "hard", **common, "groupFilter": {"minMean": 2.0}}]
    world = new_world(job(steps=40, tasks=tasks), tmp_path)
    await world.start()
    world.run.scheduler.mixture.shares["hard"].rejections_in_a_row = before
    world.connect_all()
    await world.settle(100_000)
    assert world.run.finished and world.run.failure is None
    (warning,) = world.run.warnings
    because = r"the last one because the group's mean reward [01] is below groupFilter\.minMean 2; until one is"
    assert re.match(f"task hard: 256 groups in a row were rejected or failed, {because}", warning)


async def test_samples_that_all_fail_end_the_run_with_the_reason(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(), tmp_path)
    world.reward = lambda sample, result: float("nan")
    await world.start()
    world.connect_all()
    await world.settle()
    assert world.run.failure is not None and "nan" in world.run.failure[1]


async def test_the_reward_of_a_sample_is_recorded_as_its_runner_sent_it(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(steps=2), tmp_path)
    world.reward, world.runner.turns_of = (lambda sample, result: 1.0), (lambda sample: 2)
    world.runner.credits_of = lambda sample: [-0.4]  # 1.0 - -0.4 + -0.4 is 0.9999999999999999
    await world.start()
    world.connect_all()
    await world.settle()
    assert world.run.finished
    assert {row[0] for row in world.store.query("SELECT reward FROM samples WHERE state = 'trained'")} == {1.0}


async def run_until_turn_is_requested(world: Any, turn: int) -> None:
    """Run until an engine holds a request for ``turn``; then kill the runner."""
    (agent,) = world.agents
    handle = agent.handle

    def hold(message: Any) -> None:
        handle(message)
        agent.hold = agent.hold or (isinstance(message, Generate) and message.request_id.turn == turn)

    agent.handle, world.runner.turns_of = hold, lambda sample: turn + 1
    for _ in range(200):
        await world.some(1)
        if agent.hold:
            break
    assert agent.hold
    agent.handle = handle
    world.runner.disconnect()
    world.runner.reborn()


def failed(world: Any) -> list[str]:
    return [row[0] for row in world.store.query("SELECT reason FROM samples WHERE state = 'failed'")]


async def test_a_loop_that_makes_fewer_turns_in_another_runner_fails_its_sample(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(steps=2, n=1, g=1), tmp_path)
    await world.start()
    world.connect_all()
    await run_until_turn_is_requested(world, 1)
    world.runner.turns_of = lambda sample: 1
    world.connect_all()
    await world.some(5)
    assert any("its loop made 1 turns now and 2 before" in reason for reason in failed(world))
    world.agents[0].hold = False
    await world.settle()
    assert world.run.finished
    world.check_accounts()


@pytest.mark.parametrize("interrupted", [False, True])
async def test_a_loop_that_gives_a_turn_another_context_in_another_runner_fails_its_sample(
    new_world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    world = new_world(job(steps=2, n=1, g=1), tmp_path)
    await world.start()
    world.connect_all()
    await run_until_turn_is_requested(world, 1)
    (agent,) = world.agents
    if interrupted:
        generate = next(generate for generate in agent.queue if generate.request_id.turn == 1)
        agent.queue.remove(generate)
        completion = world_module.generate_tokens(generate, 0, 0)
        agent.say(Completions([msgspec.structs.replace(completion, finish="abort")]))
    with monkeypatch.context() as patch:
        patch.setattr(world_module, "observation", lambda turn: world_module.int32([1, 1]))
        world.connect_all()
        await world.some(5)
    assert any("turn 1 was generated from another context" in reason for reason in failed(world))
