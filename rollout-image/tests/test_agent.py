"""The agent with a fake coordinator and a fake engine."""

import asyncio

import pytest

from rljob.api.roles import Rollout
from rljob.protocol.agent_protocol import (
    Abort,
    AckCompletions,
    Completions,
    EngineCrashed,
    Generate,
    PrepareWeights,
    RegisterEngine,
    RequestId,
    RestartEngine,
    SamplingParams,
    WeightAck,
    WeightFailed,
)
from rljob.protocol.health_probe import READY
from rljob.protocol.shared_messages import Probe
from rljob.rollout import agent as agent_module
from rljob.rollout import engine_restarts
from rljob.rollout.adapters.base import EngineGoneError, GenerationOutput
from rljob.rollout.agent import Agent
from rljob.rollout.supervisor import EngineStartError


class FakeEngine:
    """Server process and client in one. Requests wait until ``finish`` is set."""

    killed = False

    def __init__(self, starts=True, permanent=False):
        self.client = self
        self.starts, self.permanent, self.alive = starts, permanent, True
        self.fail = set()
        self.calls = []
        self.prompts = []
        self.ended = asyncio.get_running_loop().create_future()
        self.finish = asyncio.Event()

    async def wait_healthy(self):
        if not self.starts:
            raise EngineStartError("it cannot start: no such model", "last lines", self.permanent)

    async def wait_ended(self):
        return await asyncio.shield(self.ended)

    def last_lines(self):
        return "last lines"

    def explain(self, end):
        return f"{end}: for a reason"

    async def kill(self):
        self.die()

    async def stop(self):
        self.calls.append("stop")
        self.die()

    def die(self):
        self.alive = False
        self.finish.set()
        if not self.ended.done():
            self.ended.set_result("the engine server was killed by SIGKILL")

    async def healthy(self):
        return self.alive

    async def responsive(self):
        return self.alive

    async def generate(self, request, token_ids, sampling):
        self.prompts.append(token_ids)
        await self.finish.wait()
        if not self.alive:
            raise EngineGoneError("gone")
        return GenerationOutput(b"\1\0\0\0", b"\0\0\0\0", [], "length")

    async def abort(self, requests):
        self.calls.append("abort")
        self.finish.set()

    async def join(self, update, seconds):
        self._step("join")

    async def pause(self, in_flight):
        self._step("pause")

    async def receive(self, update, seconds):
        self._step("receive")
        return "d1"

    async def resume(self):
        self._step("resume")

    async def score(self, tokens):
        return []

    def _step(self, name):
        self.calls.append(name)
        if name in self.fail:
            raise EngineGoneError(f"{name} failed")


class World:
    """An agent with its coordinator; ``engines`` are its servers, the last one running."""

    def __init__(self, coordinator, **engine):
        self.coordinator, self.engines, self.settings = coordinator, [], engine
        self.agent = Agent(Rollout(name="main", max_concurrency=2), self._start_engine, coordinator.url, "t", 600.0)
        self.running = asyncio.create_task(self.agent.run())

    async def _start_engine(self):
        self.engines.append(FakeEngine(**self.settings))
        return self.engines[-1]

    @property
    def engine(self):
        return self.engines[-1]

    async def registered(self):
        return await self.coordinator.next(RegisterEngine)

    async def send(self, *messages):
        await self.coordinator.send(*messages)

    async def update(self, version=0, instance="", number=1):
        probe = Probe([], [])
        message = PrepareWeights(
            number, 0, version, f"g{number}", "127.0.0.1", 1, 2, "gloo", 1, [], probe, "keep", 5.0, instance
        )
        await self.send(message)

    async def in_service(self):
        registration = await self.registered()
        await self.update()
        await self.coordinator.next(WeightAck)
        return registration

    async def wait_handled(self):
        """Return when the agent has handled all messages sent so far: it answers an update that fails at once."""
        self.engine.fail.add("join")
        await self.update(number=99)
        await self.coordinator.until(lambda m: isinstance(m, WeightFailed) and m.update == 99, 60)
        self.engine.fail.discard("join")

    async def prompts(self, count):
        async with asyncio.timeout(60):
            while len(self.engine.prompts) < count:
                await asyncio.sleep(0)


def request(name):
    return Generate(RequestId(name, 0, 0), name.encode(), SamplingParams(1.0, 5, [], 1))


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(engine_restarts, "FIRST_BACKOFF_SECONDS", 0.0)
    monkeypatch.setattr(engine_restarts, "FLUSH_SECONDS", 0.05)
    monkeypatch.setattr(agent_module, "FLUSH_SECONDS", 0.05)


@pytest.fixture
async def world(coordinator, quick):
    world = World(coordinator)
    yield world
    world.running.cancel()
    await asyncio.wait([world.running])


async def test_a_new_engine_registers_without_weights_and_runs_no_request_before_it_has_weights(world):
    registration = await world.registered()
    assert (registration.pool, registration.max_concurrency, registration.running) == ("main", 2, [])
    assert (registration.lineage, registration.version, registration.digest) == (-1, -1, "")
    await world.send(request("a"))
    await world.wait_handled()
    assert world.engine.prompts == []
    await world.update(version=3)
    ack = await world.coordinator.next(WeightAck, 5)
    assert (ack.version, ack.digest, ack.probe_error) == (3, "d1", -1)
    await world.send(request("b"))
    await world.prompts(1)
    assert world.engine.prompts == [b"b"]


async def test_after_a_reconnect_it_reports_its_weights_running_and_finished_requests(world):
    first = await world.in_service()
    await world.send(request("a"))
    await world.prompts(1)
    world.engine.finish.set()
    done = await world.coordinator.completion(RequestId("a", 0, 0))
    world.engine.finish.clear()
    await world.send(request("b"))
    await world.prompts(2)
    await world.coordinator.disconnect()
    again = await world.registered()
    assert (again.instance, again.version, again.digest) == (first.instance, 0, "d1")
    assert again.running == [RequestId("b", 0, 0)]
    assert (await world.coordinator.next(Completions, 5)).items == [done]
    await world.send(AckCompletions([done.request_id]))
    await world.wait_handled()
    await world.coordinator.disconnect()
    await world.registered()
    assert not [m for m in world.coordinator.received if isinstance(m, Completions)]


async def test_a_dead_server_is_replaced_by_a_new_instance_without_requests(world):
    first = await world.in_service()
    await world.send(request("a"))
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
    await world.send(request("a"))
    await world.prompts(1)


async def test_a_server_that_answers_but_generates_nothing_is_replaced(world):
    first = await world.in_service()
    world.agent._stall_seconds = 0.02
    watching = asyncio.create_task(world.agent._watch_generation())
    await world.send(request("a"))
    assert (await world.registered()).instance != first.instance
    watching.cancel()
    crash = next(m for m in world.coordinator.received if isinstance(m, EngineCrashed))
    assert "generated no token for 0.02 s (failurePolicy.stallSeconds)" in crash.reason


async def test_a_server_that_generates_long_responses_is_not_replaced(world):
    await world.in_service()
    world.agent._stall_seconds = 0.02
    generate, probes = world.engine.generate, []

    async def long_response(name, token_ids, sampling):
        if not name.startswith("watch-"):
            return await generate(name, token_ids, sampling)
        probes.append((token_ids, sampling.max_tokens))
        return GenerationOutput(b"\1\0\0\0", b"\0\0\0\0", [], "length")

    world.engine.generate = long_response
    watching = asyncio.create_task(world.agent._watch_generation())
    await world.send(request("long"))
    async with asyncio.timeout(60):
        while len(probes) < 3:
            await asyncio.sleep(0)
    watching.cancel()
    assert set(probes) == {(b"long", 1)} and len(world.engines) == 1
    world.engine.finish.set()
    await world.coordinator.completion(RequestId("long", 0, 0))


async def test_an_update_for_the_previous_server_is_ignored(world):
    await world.registered()
    await world.update(instance="main-gone")
    await world.wait_handled()
    assert world.engine.calls.count("receive") == 0


async def test_mixed_weights_are_neither_reported_nor_used(world):
    registration = await world.in_service()
    world.engine.fail = {"receive"}
    await world.update(version=1, number=2)
    failed = await world.coordinator.next(WeightFailed, 5)
    assert (failed.update, failed.reason) == (2, "receive failed")
    assert world.engine.calls.count("resume") == 1  # that of the first update
    await world.send(request("a"))
    await world.coordinator.disconnect()
    again = await world.registered()
    assert (again.instance, again.version, again.digest) == (registration.instance, -1, "")
    assert world.engine.prompts == []
    world.engine.fail = set()
    await world.update(version=1, number=3)
    await world.coordinator.next(WeightAck, 5)
    await world.send(request("b"))
    await world.prompts(1)


async def test_a_failed_update_of_a_dead_engine_replaces_it(world):
    await world.in_service()
    world.engine.fail, world.engine.alive = {"receive"}, False
    await world.update(version=1, number=2)
    await world.coordinator.next(WeightFailed, 5)
    assert (await world.registered()).version == -1


async def test_the_coordinator_can_have_the_engine_replaced(world):
    first = await world.in_service()
    await world.send(RestartEngine("three updates failed"))
    assert (await world.registered()).instance != first.instance
    assert not world.engines[0].alive


async def crashes(coordinator, count):
    return [await coordinator.next(EngineCrashed, 5) for _ in range(count)]


async def test_an_engine_that_cannot_start_ends_the_agent_and_the_reason_is_sent(quick, coordinator):
    world = World(coordinator, starts=False)
    with pytest.raises(ExceptionGroup) as failure:
        await world.running
    assert failure.group_contains(EngineStartError, match="no such model")
    assert len(world.engines) == engine_restarts.FAILED_STARTS
    (last,) = await crashes(world.coordinator, 1)
    assert (last.pool, last.reason, last.last_lines) == ("main", "it cannot start: no such model", "last lines")
    assert last.starting and last.final
    assert not [m for m in world.coordinator.received if isinstance(m, RegisterEngine)]


async def test_an_engine_that_refuses_its_settings_is_not_started_again(quick, coordinator):
    world = World(coordinator, starts=False, permanent=True)
    with pytest.raises(ExceptionGroup) as failure:
        await world.running
    assert failure.group_contains(EngineStartError, match="no such model")
    assert len(world.engines) == 1


async def test_an_engine_that_always_dies_before_it_serves_ends_the_agent(world):
    for _ in range(engine_restarts.FAILED_STARTS):
        await world.registered()
        world.engine.die()
    with pytest.raises(ExceptionGroup) as failure:
        await world.running
    assert failure.group_contains(EngineStartError, match="SIGKILL .it had not received weights yet")
    assert [(died.restarts, died.starting, died.final) for died in await crashes(world.coordinator, 3)] == [
        (1, True, False),
        (2, True, False),
        (3, True, True),
    ]


async def test_an_engine_that_is_killed_before_it_serves_ends_the_agent_but_not_the_run(world):
    for _ in range(engine_restarts.FAILED_STARTS):
        await world.registered()
        world.engine.killed = True
        world.engine.die()
    with pytest.raises(ExceptionGroup) as failure:
        await world.running
    assert failure.group_contains(EngineStartError, match="it had not received weights yet")
    assert failure.value.exceptions[0].killed
    assert not any(died.final for died in await crashes(world.coordinator, 3))


async def test_a_crash_is_reported_with_its_cause_also_after_a_reconnect(world, monkeypatch):
    await world.in_service()
    monkeypatch.setattr(world.agent._servers, "_start", asyncio.Event().wait)
    await world.send(request("a"))
    await world.prompts(1)
    world.engine.alive = False
    world.engine.finish.set()  # the request fails: the engine inside the server is dead
    (died,) = await crashes(world.coordinator, 1)
    assert died.reason == "the engine inside the server is dead: for a reason" and not died.starting
    await world.coordinator.disconnect()
    assert await crashes(world.coordinator, 1) == [died]
    assert not [m for m in world.coordinator.received if isinstance(m, RegisterEngine)]


async def test_abort_reaches_the_engine(world):
    await world.in_service()
    await world.send(request("a"))
    await world.prompts(1)
    await world.send(Abort([RequestId("a", 0, 0)], discard=False))
    await world.coordinator.completion(RequestId("a", 0, 0))
    assert world.engine.calls.count("abort") == 1


async def test_a_leaving_agent_hands_back_its_requests_and_accepts_no_more(world):
    await world.in_service()
    await world.send(request("a"), request("b"), request("c"))  # two run, the last one waits
    await world.prompts(2)
    leaving = asyncio.create_task(world.agent.leave())
    for sample in "abc":
        await world.coordinator.completion(RequestId(sample, 0, 0))
    assert world.coordinator.heartbeats[-1].state == "leaving"
    await world.send(request("d"))
    assert not leaving.done()
    await world.send(AckCompletions([RequestId(sample, 0, 0) for sample in "abc"]))
    await asyncio.wait_for(leaving, 60)
    assert len(world.engine.prompts) == 2


async def test_an_agent_without_a_connection_leaves_at_once(world, monkeypatch):
    monkeypatch.setattr(agent_module, "LEAVING_SECONDS", 1000.0)
    await world.in_service()
    await world.send(request("a"))
    await world.prompts(1)
    await world.coordinator.stop()
    while world.agent._link.connected:
        await asyncio.sleep(0)
    await asyncio.wait_for(world.agent.leave(), 60)


async def test_the_registration_names_the_pod(coordinator):
    agent = Agent(Rollout(name="main"), None, coordinator.url, "t", 600.0, "sums-rollout-main-x")
    agent._state = "ready"
    (registration, _) = agent._register()
    assert registration.pod == "sums-rollout-main-x"


@pytest.fixture
def ready(tmp_path, monkeypatch):
    """File that exists while the agent's pod is ready."""
    monkeypatch.setenv(READY, str(tmp_path / "ready"))
    return tmp_path / "ready"


async def test_a_pod_is_ready_while_its_engine_is_healthy_with_or_without_weights(ready, world):
    await world.registered()
    assert ready.exists()
    await world.update()
    await world.coordinator.next(WeightAck)
    assert ready.exists()
    world.engine.die()
    while ready.exists():
        await asyncio.sleep(0)
    while not ready.exists():  # until the next server is healthy
        await asyncio.sleep(0.01)


async def test_a_leaving_agent_becomes_unready_first(ready, world):
    await world.in_service()
    await world.send(request("a"))
    await world.prompts(1)
    leaving = asyncio.create_task(world.agent.leave())
    await asyncio.sleep(0)
    assert not ready.exists()
    leaving.cancel()
