"""Sessions of an environment with several replicas: each stays on its replica, which may be busy, away or gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from rljob.api.roles import Environment
from rljob.protocol.episode_messages import OpenSession
from rljob.runner import environment_client, service_replicas
from rljob.runner.context import TrajectoryError
from rljob.runner.environment_client import EnvironmentClient
from rljob.runner.service_http import service_session

HOSTS = ("127.0.0.1", "127.0.0.2")
SECONDS = 5.0


class Pod:
    """One replica: it counts steps, and refuses new sessions with ``status`` if that is set."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.status = 0
        self.hosts: set[str] = set()
        self.sessions: dict[str, int] = {}
        self.ended: list[str] = []
        self.server: TestServer | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/sessions", self._open)
        app.router.add_post("/v1/sessions/{session}/steps", self._step)
        app.router.add_delete("/v1/sessions/{session}", self._end)
        self.server = TestServer(app, host=self.host, port=self.port)
        await self.server.start_server()

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.close()
        self.server, self.sessions = None, {}

    async def _open(self, request: web.Request) -> web.Response:
        self.hosts.add(request.headers["Host"])
        if self.status:
            return web.Response(status=self.status, headers={"Retry-After": "60"})
        self.sessions[json.loads(await request.text())["session"]] = 0
        return web.json_response({"step": 0, "observation": self.host})

    async def _step(self, request: web.Request) -> web.Response:
        name = request.match_info["session"]
        if name not in self.sessions:
            return web.Response(status=404, text=f"there is no session {name}")
        self.sessions[name] = json.loads(await request.text())["step"]
        return web.json_response({"step": self.sessions[name], "observation": self.host})

    async def _end(self, request: web.Request) -> web.Response:
        self.ended.append(request.match_info["session"])
        return web.Response()


class Service:
    """Two replicas behind one name, and their client."""

    def __init__(self, pods: list[Pod], client: EnvironmentClient) -> None:
        self.pods, self.client = pods, client
        self.listed = list(HOSTS)

    async def open(self, session: str) -> str:
        return (await self.client.open(OpenSession(session, 1, {}))).observation

    def pod(self, host: str) -> Pod:
        return self.pods[HOSTS.index(host)]


@pytest.fixture
async def service(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    async def addresses(url: object) -> list[str]:
        return made.listed

    monkeypatch.setattr(environment_client, "addresses_of", addresses)
    monkeypatch.setattr(environment_client, "FIRST_BACKOFF_SECONDS", 0.001)
    monkeypatch.setattr(environment_client, "LAST_BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(service_replicas, "REFRESH_SECONDS", 0.01)
    port = unused_port()
    pods = [Pod(host, port) for host in HOSTS]
    async with service_session() as session:
        entry = Environment(name="lake", builtin="frozen_lake", max_sessions=8)
        client = EnvironmentClient(entry, f"http://lake:{port}", session, "secret")
        made = Service(pods, client)
        for pod in pods:
            await pod.start()
        yield made
        await client.close()
        for pod in pods:
            await pod.stop()


async def test_sessions_are_shared_among_the_replicas_and_stay_where_they_began(service: Service) -> None:
    began = {f"s{i}": await service.open(f"s{i}") for i in range(6)}
    assert sorted(began.values()) == sorted(HOSTS * 3)
    for step in (1, 2):
        for name, host in began.items():
            assert (await service.client.step(name, step, "go")).observation == host
    assert [pod.sessions for pod in service.pods] == [
        {name: 2 for name, host in began.items() if host == here} for here in HOSTS
    ]
    assert {*service.pods[0].hosts, *service.pods[1].hosts} == {f"lake:{service.pods[0].port}"}


async def test_a_session_that_ends_is_ended_at_its_replica_which_then_gets_the_next_one(service: Service) -> None:
    began = {f"s{i}": await service.open(f"s{i}") for i in range(4)}
    for name in [name for name, host in began.items() if host == HOSTS[0]]:
        service.client.end(name)
    async with asyncio.timeout(SECONDS):
        while len(service.pods[0].ended) < 2:
            await asyncio.sleep(0.001)
    assert service.pods[1].ended == []
    assert [await service.open(f"t{i}") for i in range(2)] == [HOSTS[0]] * 2


async def test_no_replica_gets_more_sessions_than_the_service_allows(service: Service) -> None:
    began = {f"s{i}": await service.open(f"s{i}") for i in range(16)}
    waiting = asyncio.create_task(service.open("late"))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    service.client.end("s3")
    assert await asyncio.wait_for(waiting, SECONDS) == began["s3"]


@pytest.mark.parametrize("status", [429, 503])
async def test_a_replica_that_refuses_new_sessions_gets_none_until_it_said_so(service: Service, status: int) -> None:
    service.pods[0].status = status
    async with asyncio.timeout(SECONDS):
        assert [await service.open(f"s{i}") for i in range(4)] == [HOSTS[1]] * 4
    assert len(service.pods[0].hosts) == 1 and service.pods[0].sessions == {}


async def test_a_replica_that_is_gone_fails_its_own_sessions_only(service: Service) -> None:
    began = {f"s{i}": await service.open(f"s{i}") for i in range(4)}
    await service.pods[0].stop()
    service.listed = [HOSTS[1]]
    for name, host in began.items():
        if host == HOSTS[0]:
            with pytest.raises(TrajectoryError, match=r"lake: the replica at 127\.0\.0\.1 that held the session"):
                await asyncio.wait_for(service.client.step(name, 1, "go"), SECONDS)
        else:
            assert (await service.client.step(name, 1, "go")).step == 1
    assert await service.open("next") == HOSTS[1]


async def test_a_step_waits_for_a_replica_that_is_away_and_still_listed(service: Service) -> None:
    name, host = "s", await service.open("s")
    pod = service.pod(host)
    sessions = pod.sessions
    await pod.stop()
    waiting = asyncio.create_task(service.client.step(name, 1, "go"))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await pod.start()
    pod.sessions = sessions
    assert (await asyncio.wait_for(waiting, SECONDS)).observation == host


async def test_a_replica_that_was_restarted_has_lost_its_sessions(service: Service) -> None:
    pod = service.pod(await service.open("s"))
    await pod.stop()
    await pod.start()
    with pytest.raises(TrajectoryError, match="HTTP 404: there is no session s"):
        await asyncio.wait_for(service.client.step("s", 1, "go"), SECONDS)


async def test_sessions_wait_while_the_replica_is_away_and_all_begin_when_it_returns(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One session is the trial of the circuit breaker; the others do not wait for the next resolution of the name."""
    service.listed = [HOSTS[1]]
    assert await service.open("first") == HOSTS[1]
    monkeypatch.setattr(service_replicas, "REFRESH_SECONDS", 60.0)
    for pod in service.pods:
        await pod.stop()
    waiting = [asyncio.create_task(service.open(f"s{i}")) for i in range(3)]
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in waiting)
    await service.pods[1].start()
    assert await asyncio.wait_for(asyncio.gather(*waiting), SECONDS) == [HOSTS[1]] * 3
