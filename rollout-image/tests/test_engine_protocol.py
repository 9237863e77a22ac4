"""An engine's own HTTP server, with uvicorn as vLLM and SGLang start it: limits for peers without the key, none for the
agent's requests. The application behind the key is simulated."""

import asyncio
import contextlib
import dataclasses

import pytest
import uvicorn
import uvicorn.config

from e2e.fakes.served import closed, connect, served
from rljob.protocol.connection_limits import TOO_MANY, HttpLimits
from rljob.rollout.adapters.http_client import EngineHttp
from rljob.rollout.adapters.sglang.main import set_limits
from rljob.rollout.adapters.vllm.main import limit_connections
from rljob.rollout.auth_middleware import RequireKey
from rljob.rollout.engine_protocol import EngineProtocol

SHORT = 0.02  # seconds; nothing is asserted to happen within it
NEVER = 3600.0
GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
WITH_KEY = GET + b"Authorization: Bearer secret\r\n"
OF_HTTP = pytest.mark.parametrize("server_config", ["vllm", "sglang"], indirect=True)


@pytest.fixture
def server_config(request, monkeypatch):
    """uvicorn's Config as this engine makes it."""
    if request.param == "sglang":
        config = type("Config", (uvicorn.Config,), {"__init__": uvicorn.Config.__init__})
        set_limits(config)
        return config
    for name in ("HTTP_PROTOCOLS", "WS_PROTOCOLS"):
        monkeypatch.setattr(uvicorn.config, name, dict(getattr(uvicorn.config, name)))
    limit_connections()
    return uvicorn.Config


class App:
    """Streams parts of an answer, each when ``parts`` has it, until None. It echoes the messages of a WebSocket."""

    def __init__(self):
        self.parts = asyncio.Queue()
        self.received = 0

    async def __call__(self, scope, receive, send):
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept"})
            while (event := await receive())["type"] == "websocket.receive":
                await send({"type": "websocket.send", "bytes": event["bytes"]})
            return
        self.received += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (part := await self.parts.get()) is not None:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def serving(server_config, monkeypatch, app=None, **limits):
    """Return the context of a running server with the usual limits but for ``limits``."""
    monkeypatch.setattr(EngineProtocol, "limits", dataclasses.replace(HttpLimits(), **limits))

    def make():
        options = {"lifespan": "off", "log_config": None, "timeout_graceful_shutdown": 1}
        server = uvicorn.Server(server_config(RequireKey(app or App(), "secret"), **options))
        server.capture_signals = contextlib.nullcontext
        return server

    return served(make)


@OF_HTTP
@pytest.mark.parametrize("sent", [b"", GET, GET + b"Content-Length: 9\r\n\r\nhalf"])
async def test_half_a_request_to_an_engine_server_is_closed_after_its_time(server_config, monkeypatch, sent):
    async with serving(server_config, monkeypatch, head_seconds=SHORT, body_seconds=SHORT) as server:
        reader, _ = await connect(server, sent)
        answer = await closed(reader)
        assert answer.startswith(b"HTTP/1.1 401 ") if b"half" in sent else answer == b""
        assert len(server.config.open_connections) == 0


@OF_HTTP
async def test_an_idle_connection_without_the_key_is_closed_after_its_time(server_config, monkeypatch):
    async with serving(server_config, monkeypatch, idle_seconds=SHORT, head_seconds=NEVER) as server:
        reader, _ = await connect(server, GET + b"\r\n")
        assert (await closed(reader)).startswith(b"HTTP/1.1 401 ")


@OF_HTTP
async def test_many_idle_connections_do_not_keep_the_agent_out(server_config, monkeypatch):
    app = App()
    async with serving(server_config, monkeypatch, app, head_seconds=NEVER) as server:
        idle = [await connect(server) for _ in range(300)]
        app.parts.put_nowait(None)
        reader, _ = await connect(server, WITH_KEY + b"\r\n")
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        await asyncio.gather(*(closed(reader) for reader, _ in idle[:44]))
        assert server.config.open_connections.refused[TOO_MANY] >= 44
        assert len(server.config.open_connections) <= 256


@OF_HTTP
async def test_a_long_answer_is_not_ended(server_config, monkeypatch):
    times = dict.fromkeys(("head_seconds", "body_seconds", "stalled_seconds", "first_frame_seconds"), SHORT)
    app = App()
    async with serving(server_config, monkeypatch, app, **times, idle_seconds=SHORT) as server:
        reader, writer = await connect(server, WITH_KEY + b"\r\n")
        for _ in range(2):  # a second request, on the connection that was idle
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            await asyncio.sleep(5 * SHORT)  # not a token yet
            app.parts.put_nowait(b"first")
            await reader.readuntil(b"first")
            await asyncio.sleep(5 * SHORT)
            app.parts.put_nowait(b"last")
            app.parts.put_nowait(None)
            await reader.readuntil(b"last\r\n0\r\n\r\n")
            await asyncio.sleep(5 * SHORT)
            writer.write(WITH_KEY + b"\r\n")
        assert not server.config.open_connections.refused


@OF_HTTP
async def test_a_body_without_the_key_is_refused_before_it_is_sent(server_config, monkeypatch):
    app = App()
    async with serving(server_config, monkeypatch, app, body_seconds=SHORT) as server:
        reader, writer = await connect(server, GET + b"Content-Length: 99999999999\r\n\r\n")
        assert await reader.readline() == b"HTTP/1.1 401 Unauthorized\r\n"
        writer.write(b"a" * (8 << 20))
        await closed(reader)
        assert app.received == 0


@pytest.mark.parametrize("server_config", ["vllm"], indirect=True)
async def test_a_websocket_with_the_key_may_be_idle(server_config, monkeypatch):
    times = dict.fromkeys(("head_seconds", "first_frame_seconds"), SHORT)
    async with serving(server_config, monkeypatch, **times, idle_seconds=SHORT) as server:
        http = EngineHttp("engine", f"http://127.0.0.1:{server.address[1]}", "secret")
        try:
            async with http.connect("/generate") as stream:
                for message in (b"first", b"second"):
                    await asyncio.sleep(5 * SHORT)
                    await stream.send_bytes(message)
                    assert await stream.receive_bytes() == message
        finally:
            await http.close()
        assert not server.config.open_connections.refused


@pytest.mark.parametrize("server_config", ["vllm"], indirect=True)
async def test_a_websocket_without_the_key_is_refused_and_released(server_config, monkeypatch):
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    async with serving(server_config, monkeypatch, head_seconds=NEVER) as server:
        reader, _ = await connect(server, GET + upgrade + b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n")
        assert (await closed(reader)).startswith(b"HTTP/1.1 403 ")
        while len(server.config.open_connections):
            await asyncio.sleep(0)
        assert not server.config.open_connections.refused
