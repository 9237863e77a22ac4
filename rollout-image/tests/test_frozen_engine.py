"""The engine of a frozen pool: what a reward receives from it, with a fake server and with one that is a process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from e2e.fakes.chat_server import ChatServer
from e2e.fakes.judge_engine import JudgeEngine
from rljob.api.roles import Rollout
from rljob.rollout import engine_restarts, frozen_engine
from rljob.rollout.frozen_engine import FrozenEngine
from rljob.rollout.supervisor import EngineProcess

POOL = Rollout(name="judge", model="big", max_concurrency=1)
CHAT = {"model": "judge", "messages": [{"role": "user", "content": "Hello"}]}


class FakeServer:
    """An engine's server in this process, and its :class:`EngineProcess`."""

    killed = False
    key = "key of this start"

    def __init__(self, server: ChatServer) -> None:
        self.client: Any = self
        self.chat, self.alive, self.ended = server, True, asyncio.Event()
        self.served = TestServer(server.app())

    async def start(self) -> FakeServer:
        await self.served.start_server()
        self.url = str(self.served.make_url("")).rstrip("/")
        return self

    async def wait_healthy(self) -> None:
        pass

    async def healthy(self) -> bool:
        return self.alive

    async def wait_ended(self) -> str:
        await self.ended.wait()
        return "the engine server was killed by SIGKILL"

    def explain(self, end: str) -> str:
        return f"{end}: for a reason"

    def last_lines(self) -> str:
        return "last lines"

    async def kill(self) -> None:
        self.ended.set()
        await self.served.close()

    stop = kill


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_restarts, "FIRST_BACKOFF_SECONDS", 0.0)


@asynccontextmanager
async def running(
    start: Callable[[], Awaitable[Any]], stall_seconds: float = 600.0
) -> AsyncIterator[Callable[..., Awaitable[tuple[int, str]]]]:
    """Yield a function that posts to the listener and returns status and body."""
    address = f"127.0.0.1:{unused_port()}"
    engine = FrozenEngine(POOL, start, address, "secret", stall_seconds)
    serving = asyncio.create_task(engine.run())
    await asyncio.wait({serving, asyncio.create_task(engine.server.listening.wait())}, return_when="FIRST_COMPLETED")
    async with aiohttp.ClientSession() as session:

        async def post(path: str = "/v1/chat/completions", token: str = "secret", **body: Any) -> tuple[int, str]:
            headers = {"Authorization": f"Bearer {token}"}
            async with session.post(f"http://{address}{path}", json=CHAT | body, headers=headers) as response:
                return response.status, await response.text()

        try:
            yield post
        finally:
            await engine.leave()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


async def served(post: Callable[..., Awaitable[tuple[int, str]]], **body: Any) -> tuple[int, str]:
    """Return the first answer that comes from an engine."""
    async with asyncio.timeout(30):
        while (answer := await post(**body))[0] == 503:
            await asyncio.sleep(0.01)
    return answer


async def test_requests_are_forwarded_with_the_key_of_the_server() -> None:
    chat = ChatServer(lambda message: f"{message} to you")
    async with running(FakeServer(chat).start) as post:
        status, text = await served(post)
        assert status == 200 and "Hello to you" in text
        assert chat.tokens == ["Bearer key of this start"] and chat.bodies[0]["model"] == "judge"
        assert await post("/inference/v1/generate") == (404, '{"detail":"Not Found"}'), "no other path of the server"


async def test_a_request_needs_the_token() -> None:
    chat = ChatServer(lambda message: "yes")
    async with running(FakeServer(chat).start) as post:
        await served(post)
        status, text = await post(token="other")
        assert (status, text) == (401, "this request requires the token that rljob gave to rewards and runners\n")
    assert len(chat.messages) == 1


async def test_without_a_server_a_client_is_asked_to_come_again() -> None:
    async def never() -> Any:
        await asyncio.Event().wait()

    async with running(never) as post:
        assert await post() == (503, "the engine is starting; repeat the request\n")


async def test_a_refusal_of_the_server_is_passed_on() -> None:
    refusal = web.json_response({"error": "max_tokens is too large"}, status=400)
    async with running(FakeServer(ChatServer(lambda message: refusal)).start) as post:
        assert await served(post) == (400, '{"error": "max_tokens is too large"}')


async def test_too_many_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen_engine, "WAITING_PER_SLOT", 1)
    chat, go = ChatServer(lambda message: "yes"), asyncio.Event()
    plain = chat.answer

    async def slow(request: web.Request) -> web.StreamResponse:
        await go.wait()
        return await plain(request)

    chat.answer = slow  # type: ignore[method-assign]
    async with running(FakeServer(chat).start) as post:
        asked = [asyncio.create_task(served(post)) for _ in range(2)]
        await asyncio.wait(asked, return_when="FIRST_COMPLETED")
        go.set()
        assert sorted([(await each)[0] for each in asked]) == [200, 429]


async def test_a_server_whose_engine_is_dead_is_replaced() -> None:
    servers: list[FakeServer] = []

    async def start() -> FakeServer:
        broken = not servers
        reply = web.Response(status=500, text="EngineDeadError") if broken else "yes"
        server = FakeServer(ChatServer(lambda message: reply))
        server.alive = not broken
        servers.append(server)
        return await server.start()

    async with running(start) as post:
        assert await served(post) == (500, "EngineDeadError")
        assert (await served(post))[0] == 200
    assert len(servers) == 2 and servers[0].ended.is_set()


async def test_a_server_that_answers_nothing_is_replaced() -> None:
    servers: list[FakeServer] = []

    async def start() -> FakeServer:
        chat = ChatServer(lambda message: "yes")
        if not servers:
            chat.answer = lambda request: asyncio.sleep(1000)  # type: ignore[method-assign, assignment, return-value]
        app = chat.app

        def with_probe() -> web.Application:
            made = app()
            made.router.add_post("/v1/completions", chat.answer)
            return made

        chat.app = with_probe  # type: ignore[method-assign]
        servers.append(FakeServer(chat))
        return await servers[-1].start()

    async with running(start, stall_seconds=0.2) as post:
        status, text = await served(post)
        assert status == 500 and text.startswith("the engine ended while it worked on the request")
        while (answer := await served(post))[0] == 500:  # a slow machine may need longer than the limit
            pass
        assert answer[0] == 200


@pytest.mark.parametrize("path", ["/classify", "/pooling"])
async def test_a_server_that_classifies_is_asked_for_an_output_before_it_is_replaced(path: str) -> None:
    """It has no completions, so that their status would say nothing about its engine."""
    probes: list[Any] = []
    probed = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        if "messages" in body:
            await asyncio.sleep(1000)
        probes.append(body)
        probed.set()
        return web.json_response({"data": []})

    chat = ChatServer(lambda message: "yes")
    app = chat.app

    def classifying() -> web.Application:
        made = app()
        made.router.add_post(path, answer)
        return made

    chat.app = classifying  # type: ignore[method-assign]
    async with running(FakeServer(chat).start, stall_seconds=0.2) as post:
        asking = asyncio.create_task(served(partial(post, path)))
        async with asyncio.timeout(60):
            await probed.wait()
        asking.cancel()
    assert probes[0] == {"model": "judge", "input": [0]}


async def test_a_request_whose_client_leaves_ends_at_the_engine() -> None:
    left, started = asyncio.Event(), asyncio.Event()
    chat = ChatServer(lambda message: "yes")

    async def wait(request: web.Request) -> web.StreamResponse:
        started.set()
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            left.set()
            raise
        raise AssertionError

    chat.answer = wait  # type: ignore[method-assign]
    async with running(FakeServer(chat).start) as post:
        asking = asyncio.create_task(served(post))
        async with asyncio.timeout(60):
            await started.wait()
            asking.cancel()
            await left.wait()


async def test_an_engine_that_dies_is_started_again_and_serves_the_next_request(tmp_path: Path) -> None:
    """With a process; nothing of this job is lost, because clients repeat a request without an answer."""
    adapter = JudgeEngine(POOL, tmp_path)
    start = partial(EngineProcess.start, adapter, adapter.launch_frozen)
    async with running(start) as post:
        assert (await served(post))[0] == 200
        deadly = {"messages": [{"role": "user", "content": "kill the engine"}]}
        status, text = await post(**deadly)
        assert status == 500 and text.startswith("the engine ended while it worked on the request")
        while (answer := await served(post))[0] == 500:  # a request may reach the dying process
            assert answer[1].startswith("the engine ended while it worked on the request")
        assert answer[0] == 200 and "<score>4</score>" in answer[1]
