"""Weight updates that fail: a lost trainer is no failure of the engines, and rounds count, not engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from world import job

from rljob.coordinator.weight_publisher import MAX_FAILED_ROUNDS
from rljob.protocol.agent_protocol import WeightFailed
from rljob.protocol.known_tensors import KnownTensors, tensors_digest
from rljob.protocol.shared_messages import ParameterMeta, Probe
from rljob.protocol.trainer_protocol import EngineTarget, SendWeights, WeightGroupReady


def fail_update(agent: Any) -> None:
    """Let an agent report that its prepared update failed."""
    update, agent.preparing = agent.preparing, None
    agent.say(WeightFailed(update.update, "the connection to the trainer broke"))


async def until_version(world: Any, version: int) -> None:
    """Run until the trainer has applied ``version`` batches."""
    for _ in range(200):
        if world.run.version >= version:
            return
        await world.some(1)
    raise AssertionError(f"the run is still at version {world.run.version}")


def announce(world: Any, send: SendWeights, engines: int) -> None:
    """Announce the groups of the first ``engines`` engines of an update; nothing is sent."""
    for target in send.engines[:engines]:
        group = f"group-{send.update}-{target.engine}"
        world.trainer.say(
            WeightGroupReady(send.incarnation, send.update, target.engine, group, "", 0, 2, "gloo", [], Probe([], []))
        )


@pytest.mark.parametrize("engines", [1, 12, 64])
@pytest.mark.parametrize("announced", ["none", "half", "all"])
@pytest.mark.parametrize("noticed_first_by", ["agents", "coordinator"])
async def test_a_trainer_that_dies_during_updates_does_not_end_the_run(
    new_world: Any, tmp_path: Path, engines: int, announced: str, noticed_first_by: str
) -> None:
    world = new_world(job(n=1, steps=1), tmp_path, engines=engines)
    await world.start()
    execute = world.trainer._execute
    deaths = MAX_FAILED_ROUNDS + 1

    def die(command: Any) -> None:
        nonlocal deaths
        if not isinstance(command, SendWeights) or not command.engines or not deaths:
            execute(command)
            return
        deaths -= 1
        announce(world, command, {"none": 0, "half": len(command.engines) // 2, "all": engines}[announced])
        for agent in world.agents:
            super(type(agent), agent).step()
        preparing = [agent for agent in world.agents if agent.preparing is not None]
        if noticed_first_by == "coordinator":
            world.trainer.disconnect()
        for agent in preparing:
            fail_update(agent)
        if world.trainer.peer is not None:
            world.trainer.disconnect()
        assert all(engine.serving is None for engine in world.run.engines.by_instance.values())
        world.trainer.reborn()
        world.trainer.connect()

    world.trainer._execute = die
    world.connect_all()
    await world.settle()
    assert world.run.failure is None and world.run.finished and not deaths


async def test_an_update_that_times_out_on_64_engines_counts_once(new_world: Any, tmp_path: Path) -> None:
    """Every engine fails at another moment, and its next update starts at once."""
    world = new_world(job(n=1, steps=1), tmp_path, engines=64)
    await world.start()
    world.trainer._execute = lambda command: isinstance(command, SendWeights) and announce(world, command, 64)
    world.connect_all()
    failures = 0
    while world.run.failure is None and failures < 2 * MAX_FAILED_ROUNDS:
        while not all(agent.preparing is not None for agent in world.agents):
            await world.some(1)
        failures += 1
        for agent in world.agents:
            fail_update(agent)
            await world.store.drain()  # the next update of this engine starts before the next engine fails
            world.trainer.step()
    assert failures >= MAX_FAILED_ROUNDS // 2, "each failed 6 times; a round may hold a part of the engines"
    assert world.run.failure is not None and world.run.failure[0] == "WeightSyncFailed"


async def test_one_engine_that_fails_often_during_an_update_of_others_does_not_end_the_run(
    new_world: Any, tmp_path: Path
) -> None:
    world = new_world(job(n=1, steps=1), tmp_path, engines=3)
    await world.start()
    broken, *others = world.agents
    hold, steps = True, [agent.step for agent in others]
    for agent, step in zip(others, steps, strict=True):
        agent.step = lambda agent=agent, step=step: super(type(agent), agent).step() if hold else step()
    step_broken = broken.step

    def fail() -> bool:
        super(type(broken), broken).step()
        if hold and broken.preparing is not None:
            fail_update(broken)
        return step_broken() if not hold else True

    broken.step = fail
    world.connect_all()
    await world.some(6 * MAX_FAILED_ROUNDS)
    assert world.run.failure is None and broken.lives > 3, "it failed and was restarted"
    hold = False
    await world.settle()
    assert world.run.finished


def answer_by_hand(agent: Any) -> None:
    """Let an agent hold each prepared update until :func:`fail_next` or :func:`commit_next`."""
    agent.step = lambda: super(type(agent), agent).step()


async def prepared(world: Any, agent: Any) -> None:
    """Wait until an agent has prepared its next update."""
    for _ in range(20):
        if agent.preparing is not None:
            return
        await world.some(1)
    raise AssertionError(f"{agent.name} gets no update")


async def fail_next(world: Any, agent: Any, times: int = 1) -> None:
    """Fail the next updates of an agent, one after the other."""
    for _ in range(times):
        await prepared(world, agent)
        fail_update(agent)


async def commit_next(world: Any, agent: Any) -> None:
    """Commit the next update of an agent."""
    await prepared(world, agent)
    type(agent).step(agent)
    assert agent.preparing is None and agent.version == world.run.version


async def begin_by_hand(new_world: Any, directory: Path, engines: int, connected: int) -> Any:
    """Return a world without a runner, so that the version does not change, and its first ``connected`` agents."""
    world = new_world(job(n=1, steps=1), directory, engines=engines)
    await world.start()
    for part in (world.trainer, *world.agents[:connected]):
        part.connect()
    for agent in world.agents:
        answer_by_hand(agent)
    return world


async def test_rounds_that_fail_between_others_that_succeed_do_not_end_the_run(new_world: Any, tmp_path: Path) -> None:
    world = await begin_by_hand(new_world, tmp_path, engines=1, connected=1)
    (agent,) = world.agents
    for _ in range(MAX_FAILED_ROUNDS + 1):
        await fail_next(world, agent)
        await commit_next(world, agent)
        agent.disconnect()
        agent.reborn()
        agent.connect()
    assert world.run.failure is None
    await fail_next(world, agent, MAX_FAILED_ROUNDS)
    assert world.run.failure is not None and world.run.failure[0] == "WeightSyncFailed", "in a row they do"


async def test_an_engine_that_gets_no_weights_does_not_end_the_run_while_another_one_serves_them(
    new_world: Any, tmp_path: Path
) -> None:
    world = await begin_by_hand(new_world, tmp_path, engines=2, connected=2)
    good, broken = world.agents
    await commit_next(world, good)
    await fail_next(world, broken, 2 * MAX_FAILED_ROUNDS)
    assert world.run.failure is None
    good.disconnect()
    await fail_next(world, broken, MAX_FAILED_ROUNDS)
    assert world.run.failure is not None and world.run.failure[0] == "WeightSyncFailed"


@pytest.mark.parametrize("first_round", ["has no failure", "succeeds"])
async def test_a_failed_update_counts_against_its_own_round_and_only_if_no_engine_committed_in_it(
    new_world: Any, tmp_path: Path, first_round: str
) -> None:
    """The first engine leaves; then the run fails with the updates of twelve rounds of the second one."""
    together = first_round == "succeeds"
    world = await begin_by_hand(new_world, tmp_path, engines=2, connected=1 + together)
    first, second = world.agents
    if together:
        await prepared(world, second)
        await commit_next(world, first)
    else:
        await prepared(world, first)
        second.connect()
        await prepared(world, second)
    first_update = first.preparing.update if first.preparing is not None else second.preparing.update
    assert second.preparing.update - first_update == (not together), "one round, or the next"
    if together:
        first.disconnect()
        await fail_next(world, second)
    else:
        await fail_next(world, second)
        first.disconnect()
    await fail_next(world, second, MAX_FAILED_ROUNDS - 1)
    assert world.run.failure is None
    await fail_next(world, second)
    assert world.run.failure is not None and world.run.failure[0] == "WeightSyncFailed"


@pytest.mark.parametrize("restarted", [False, True])
async def test_with_in_flight_wait_an_update_starts_when_the_sequences_of_its_engine_have_ended(
    new_world: Any, tmp_path: Path, restarted: bool
) -> None:
    """So the time limit of an update does not limit the length of answers."""
    world = new_world(job(n=1, g=1, steps=5, alpha=1, weightSync={"inFlight": "wait"}), tmp_path, engines=2)
    await world.start()
    slow, fast = world.agents
    slow.hold = True
    world.connect_all()
    while world.run.version < 1 or fast.version < 1:
        await world.some(1)
    assert slow.queue and slow.version == 0
    if restarted:
        world.kill_coordinator()
        await world.start()
        world.trainer.connect()
        for agent in world.agents:
            agent.connect()
        await world.some(5)
        assert slow.version == 0 and slow.preparing is None, "no runner has repeated its request yet"
        world.runner.connect()
    await world.some(10)
    (engine,) = (e for e in world.run.engines.by_instance.values() if e.instance == slow.instance)
    assert engine.requests and engine.update is None and slow.version == 0
    slow.hold = False
    await world.settle()
    assert world.run.finished and slow.version > 0
    world.check_accounts()


async def test_the_trainer_opens_a_group_for_all_workers_of_an_engine(new_world: Any, tmp_path: Path) -> None:
    sizes = {"tensor": 2, "pipeline": 3, "data": 2}
    world = new_world(job(n=1, steps=1, rollouts=[{"name": "main", "parallelism": sizes}]), tmp_path)
    await world.start()
    targets: list[EngineTarget] = []
    execute = world.trainer._execute

    def note(command: Any) -> None:
        targets.extend(command.engines if isinstance(command, SendWeights) else ())
        execute(command)

    world.trainer._execute = note
    world.connect_all()
    await world.settle()
    assert world.run.finished and {target.workers for target in targets} == {12}


def noted_targets(world: Any) -> list[tuple[str, int]]:
    """Return a list that gets engine and version of every update that the trainer gets a command for."""
    targets: list[tuple[str, int]] = []
    execute = world.trainer._execute

    def note(command: Any) -> None:
        if isinstance(command, SendWeights):
            targets.extend((target.engine, world.trainer.step_) for target in command.engines)
        execute(command)

    world.trainer._execute = note
    return targets


async def test_an_engine_that_joins_serves_the_present_weights_after_one_update(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(n=1, steps=6, alpha=1), tmp_path, engines=2)
    await world.start()
    targets, late = noted_targets(world), world.agents.pop()
    world.connect_all()
    while world.run.version < 2:
        await world.some(1)
    before = [version for engine, version in targets]
    world.agents.append(late)
    late.connect()
    while late.version < 0:
        await world.some(1)
    of_late = [version for engine, version in targets if engine == late.instance]
    assert of_late == [late.version] and late.version >= 2
    assert len(targets) - len(before) - 1 <= late.version - max(before), "no other engine was updated for it"
    await world.settle()
    assert world.run.finished


async def test_an_engine_that_does_not_answer_costs_its_own_time_limit_once(new_world: Any, tmp_path: Path) -> None:
    """The others are updated and the run continues meanwhile; then the engine gets one more update, in a new group."""
    world = new_world(job(n=1, steps=6, alpha=1), tmp_path, engines=3)
    await world.start()
    targets, silent = noted_targets(world), world.agents[0]
    step, silent.step = silent.step, lambda: super(type(silent), silent).step()
    world.connect_all()
    while world.run.version < 3:
        await world.some(1)
    assert [version for engine, version in targets if engine == silent.instance] == [0]
    assert all(agent.version >= 2 for agent in world.agents[1:])
    (engine,) = (each for each in world.run.engines.by_instance.values() if each.instance == silent.instance)
    assert engine.update is not None and engine.failures == 0
    world.run.weights._expire(engine, engine.update)
    assert (engine.failures, engine.fresh) == (1, True)
    silent.preparing, silent.step = None, step
    while silent.version < 0:
        await world.some(1)
    assert [version for engine, version in targets if engine == silent.instance] == [0, silent.version]
    await world.settle()
    assert world.run.finished and silent.lives == 0


async def test_the_list_of_tensors_is_sent_once_to_each_connection(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(n=1, steps=9), tmp_path, engines=2)
    await world.start()
    world.connect_all()
    await until_version(world, 3)
    first, second = world.agents
    assert (world.trainer.lists, first.lists, second.lists) == (2, 1, 1), "the trainer announced the first two at once"
    first.disconnect()
    first.connect()
    await until_version(world, 6)
    assert (world.trainer.lists, first.lists, second.lists) == (2, 2, 1)
    world.kill_coordinator()
    await world.start()
    world.connect_all()
    await world.settle()
    assert world.run.finished
    assert world.trainer.lists <= 4 and (first.lists, second.lists) == (3, 2), "the next coordinator knows no list"


async def test_an_engine_gets_the_list_of_tensors_again_after_a_failed_update(new_world: Any, tmp_path: Path) -> None:
    world = new_world(job(n=1, steps=4), tmp_path, engines=1)
    await world.start()
    (agent,) = world.agents
    step, failures = agent.step, 1

    def fail_once() -> bool:
        nonlocal failures
        if failures and agent.preparing is not None:
            failures -= 1
            fail_update(agent)
        return step() if not failures else super(type(agent), agent).step()

    agent.step = fail_once
    world.connect_all()
    await world.settle()
    assert world.run.finished and agent.lists == 2


def test_a_list_of_tensors_is_known_by_its_digest() -> None:
    known, one, two = KnownTensors(), [ParameterMeta("a", "float32", [1])], [ParameterMeta("b", "float32", [1])]
    assert known.of("", one) == one and known.digest == ""
    assert known.of(tensors_digest(one), []) is None
    assert known.of(tensors_digest(one), one) == one == known.of(tensors_digest(one), [])
    assert known.of(tensors_digest(two), []) is None, "another model"
    assert tensors_digest(two) != tensors_digest(one)
