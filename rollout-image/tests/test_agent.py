"""The agent between a coordinator and an engine, neither of them real."""

import asyncio

import pytest

from rljob.api.models import Rollout
from rljob.protocol.messages import (
    Abort,
    AckCompletions,
    Completions,
    Drain,
    Generate,
    Part,
    PrepareWeights,
    Probe,
    RegisterEngine,
    RestartEngine,
    SamplingParams,
    WeightAck,
    WeightFailed,
)
from rljob.rollout import agent as agent_module
from rljob.rollout.adapters.base import EngineGoneError, Output
from rljob.rollout.agent import Agent
from rljob.rollout.supervisor import EngineStartError


class FakeEngine:
    """Server process and client in one. Requests wait until ``finish`` is called."""

    def __init__(self, starts=True):
        self.client = self
        self.starts, self.alive = starts, True
        self.fail = set()
        self.calls = []
        self.prompts = []
        self.ended = asyncio.get_running_loop().create_future()
        self.go_on = asyncio.Event()

    async def wait_healthy(self):
        if not self.starts:
            raise EngineStartError("it cannot start: no such model")

    async def wait_ended(self):
        return await asyncio.shield(self.ended)

    def last_lines(self):
        return "last words"

    async def kill(self):
        self.die()

    async def stop(self):
        self.calls.append("stop")
        self.die()

    def die(self):
        self.alive = False
        self.go_on.set()
        if not self.ended.done():
            self.ended.set_result("the engine server was killed by SIGKILL")

    async def healthy(self):
        return self.alive

    async def responsive(self):
        return self.alive

    async def generate(self, request, token_ids, sampling):
        self.prompts.append(token_ids)
        await self.go_on.wait()
        if not self.alive:
            raise EngineGoneError("gone")
        return Output(b"\1\0\0\0", b"\0\0\0\0", [], "length")

    async def abort(self, requests):
        self.calls.append("abort")
        self.go_on.set()

    async def join(self, update, seconds):
        self._step("join")

    async def pause(self, in_flight):
        self._step("pause")

    async def receive(self, update, seconds):
        self._step("receive")

    async def resume(self):
        self._step("resume")

    async def digest(self):
        return "d1"

    async def score(self, tokens):
        return []

    def _step(self, name):
        self.calls.append(name)
        if name in self.fail:
            raise EngineGoneError(f"{name} failed")


class World:
    """An agent with its coordinator; ``engines`` are its servers, the last one running."""

    def __init__(self, coordinator):
        self.coordinator, self.engines, self.starts = coordinator, [], True
        self.agent = Agent(Rollout(name="main", max_concurrency=2), self._start_engine, coordinator.url, "t")
        self.running = asyncio.create_task(self.agent.run())

    async def _start_engine(self):
        self.engines.append(FakeEngine(self.starts))
        return self.engines[-1]

    @property
    def engine(self):
        return self.engines[-1]

    async def registered(self):
        return await self.coordinator.next(RegisterEngine, seconds=5)

    async def say(self, *messages):
        await self.coordinator.say(*messages)

    async def update(self, version=0, instance="", number=1):
        probe = Probe([], [], 0.0)
        order = PrepareWeights(
            number, 0, version, f"g{number}", "127.0.0.1", 1, 2, "gloo", 1, [], probe, "keep", 5.0, instance
        )
        await self.say(order)

    async def in_service(self):
        registration = await self.registered()
        await self.update()
        await self.coordinator.next(WeightAck, seconds=5)
        return registration

    async def said(self):
        """Return once the agent has taken in all that was said: it answers an order that fails at once."""
        self.engine.fail.add("join")
        await self.update(number=99)
        await self.coordinator.until(lambda m: isinstance(m, WeightFailed) and m.update == 99, 5)
        self.engine.fail.discard("join")

    async def prompts(self, count):
        async with asyncio.timeout(5):
            while len(self.engine.prompts) < count:
                await asyncio.sleep(0)


def ask(name):
    return Generate(Part(name, 0, 0), name.encode(), SamplingParams(1.0, 5, [], 1))


@pytest.fixture
async def world(coordinator, monkeypatch):
    monkeypatch.setattr(agent_module, "FIRST_BACKOFF_SECONDS", 0.0)
    world = World(coordinator)
    yield world
    world.running.cancel()
    await asyncio.wait([world.running])


async def test_a_new_engine_registers_without_weights_and_runs_nothing_before_it_has_some(world):
    registration = await world.registered()
    assert (registration.pool, registration.max_concurrency, registration.running) == ("main", 2, [])
    assert (registration.lineage, registration.version, registration.digest) == (-1, -1, "")
    await world.say(ask("a"))
    await world.said()
    assert world.engine.prompts == []
    await world.update(version=3)
    ack = await world.coordinator.next(WeightAck, 5)
    assert (ack.version, ack.digest, ack.probe_error) == (3, "d1", -1)
    await world.say(ask("b"))
    await world.prompts(1)
    assert world.engine.prompts == [b"b"]


async def test_after_a_reconnect_it_says_what_it_serves_has_in_hand_and_has_finished(world):
    first = await world.in_service()
    await world.say(ask("a"))
    await world.prompts(1)
    world.engine.go_on.set()
    done = await world.coordinator.completion(Part("a", 0, 0))
    world.engine.go_on.clear()
    await world.say(ask("b"))
    await world.prompts(2)
    await world.coordinator.disconnect()
    again = await world.registered()
    assert (again.instance, again.version, again.digest) == (first.instance, 0, "d1")
    assert again.running == [Part("b", 0, 0)]
    assert (await world.coordinator.next(Completions, 5)).items == [done]
    await world.say(AckCompletions([done.part]))
    await world.said()
    await world.coordinator.disconnect()
    await world.registered()
    assert not [m for m in world.coordinator.received if isinstance(m, Completions)]


async def test_a_dead_server_is_replaced_under_a_new_instance_with_nothing_in_hand(world):
    first = await world.in_service()
    await world.say(ask("a"))
    await world.prompts(1)
    world.engine.die()
    second = await world.registered()
    assert second.instance != first.instance
    assert (second.version, second.running) == (-1, [])
    assert len(world.engines) == 2
    assert world.coordinator.connections == 1
    assert "starting" in [beat.state for beat in world.coordinator.heartbeats]
    await world.update()
    await world.coordinator.next(WeightAck, 5)
    await world.say(ask("a"))
    await world.prompts(1)


async def test_an_update_meant_for_the_server_before_is_ignored(world):
    await world.registered()
    await world.update(instance="main-gone")
    await world.said()
    assert world.engine.calls.count("receive") == 0


async def test_mixed_weights_are_never_claimed_nor_used(world):
    registration = await world.in_service()
    world.engine.fail = {"receive"}
    await world.update(version=1, number=2)
    failed = await world.coordinator.next(WeightFailed, 5)
    assert (failed.update, failed.reason) == (2, "receive failed")
    assert world.engine.calls.count("resume") == 1  # that of the first update
    await world.say(ask("a"))
    await world.coordinator.disconnect()
    again = await world.registered()
    assert (again.instance, again.version, again.digest) == (registration.instance, -1, "")
    assert world.engine.prompts == []
    world.engine.fail = set()
    await world.update(version=1, number=3)
    await world.coordinator.next(WeightAck, 5)
    await world.say(ask("b"))
    await world.prompts(1)


async def test_a_failed_update_of_a_dead_engine_replaces_it(world):
    await world.in_service()
    world.engine.fail, world.engine.alive = {"receive"}, False
    await world.update(version=1, number=2)
    await world.coordinator.next(WeightFailed, 5)
    assert (await world.registered()).version == -1


async def test_the_coordinator_can_have_the_engine_replaced(world):
    first = await world.in_service()
    await world.say(RestartEngine("three updates failed"))
    assert (await world.registered()).instance != first.instance
    assert not world.engines[0].alive


async def test_an_engine_that_cannot_start_ends_the_agent(coordinator, monkeypatch):
    monkeypatch.setattr(agent_module, "FIRST_BACKOFF_SECONDS", 0.0)
    world = World(coordinator)
    world.starts = False
    with pytest.raises(ExceptionGroup) as failure:
        await world.running
    assert failure.group_contains(EngineStartError, match="no such model")
    assert len(world.engines) == agent_module.FAILED_STARTS
    assert coordinator.connections == 0


async def test_an_engine_that_always_dies_before_it_serves_ends_the_agent(world):
    for _ in range(agent_module.FAILED_STARTS):
        await world.registered()
        world.engine.die()
    with pytest.raises(ExceptionGroup) as failure:
        await world.running
    assert failure.group_contains(EngineStartError, match="before it served anything.*\nlast words")


async def test_abort_reaches_the_engine(world):
    await world.in_service()
    await world.say(ask("a"))
    await world.prompts(1)
    await world.say(Abort([Part("a", 0, 0)], discard=False))
    await world.coordinator.completion(Part("a", 0, 0))
    assert world.engine.calls.count("abort") == 1


async def test_a_drained_agent_ends_when_everything_is_acknowledged(world):
    await world.in_service()
    await world.say(ask("a"), Drain())
    await world.prompts(1)
    world.engine.go_on.set()
    done = await world.coordinator.completion(Part("a", 0, 0))
    assert not world.running.done()
    await world.say(AckCompletions([done.part]))
    await asyncio.wait_for(world.running, 5)
    assert world.engine.calls[-1] == "stop"
