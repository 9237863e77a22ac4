"""Connections to the coordinator's server: who may connect, and what a peer without a token can take."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from world import job

from rljob.coordinator.metrics import REFUSED, REGISTRY
from rljob.coordinator.routes import build_app
from rljob.protocol.agent_protocol import ToAgent
from rljob.protocol.connection_limits import HttpLimits
from rljob.protocol.frames import encode_frame, frame_decoder
from rljob.protocol.http_server import HttpServer, token_check
from rljob.protocol.runner_protocol import RegisterRunner
from rljob.protocol.websocket_protocol import WebSocketProtocol

TOKENS = {"agent": "a-token", "runner": "r-token", "trainer": "t-token"}
DEEP = b"\x91" * 200_000 + b"\xc0"
REQUEST_ID = b"\x94" + msgspec.msgpack.encode("g0.0") + b"\x00\x00" + DEEP
"""A RequestId with one element more than this version knows: a deeply nested list, which the decoder skips."""
BAD_FRAMES = {
    "empty": b"",
    "type never used": b"\xc1",
    "number": b"\x91\xff",
    "announces 2**32 - 1 messages": b"\xdd\xff\xff\xff\xff",
    "announces 4 GiB": b"\x91\x92\xabCompletions\xc6\xff\xff\xff\xff",
    "bytes for text": msgspec.msgpack.encode([["GenerationFailed", ["g0.0", 0, 0], b"\xff", False]]),
    "not UTF-8": b"\x91\x94\xb0GenerationFailed\x93\xa4g0\xff\xfe\x00\x00\xa1x\xc2",
    "200,000 lists": DEEP,
    "200,000 lists in a skipped element": b"\x91\x94\xb0GenerationFailed" + REQUEST_ID + b"\xa1x\xc2",
    "unknown message": msgspec.msgpack.encode([["NoSuchMessage", 1]]),
}


@pytest.fixture
async def serving(new_world: Any, tmp_path: Path) -> AsyncIterator[Any]:
    """Return a function that starts the server of a run, as the coordinator does; it returns the server."""
    async with contextlib.AsyncExitStack() as closing:

        async def start(**limits: Any) -> Any:
            world = new_world(job(), tmp_path)
            await world.start()
            listener = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
            server: Any = HttpServer(
                build_app(world.run, TOKENS),
                dataclasses.replace(HttpLimits(), **limits),
                token_check(TOKENS.values()),
                signals=False,
                ws=WebSocketProtocol,
                lifespan="off",
                log_config=None,
            )
            server.url, server.world = f"http://127.0.0.1:{listener.getsockname()[1]}", world
            running = asyncio.create_task(server.serve([listener]))
            closing.push_async_callback(_end, server, running)
            await server.listening.wait()
            return server

        yield start
    for collector in list(REGISTRY._collector_to_names):
        if type(collector).__name__ == "RunCollector":
            REGISTRY.unregister(collector)


async def _end(server: Any, running: asyncio.Task[None]) -> None:
    server.should_exit = server.force_exit = True
    await running


@contextlib.asynccontextmanager
async def connected(server: Any, role: str, token: str = "") -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    headers = {"Authorization": f"Bearer {token or TOKENS[role]}"}
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"{server.url}/v1/connect/{role}", headers=headers) as websocket,
    ):
        yield websocket


@pytest.mark.parametrize("frame", BAD_FRAMES.values(), ids=BAD_FRAMES)
async def test_a_bad_frame_is_refused_with_one_sentence_and_closes_the_connection(serving: Any, frame: bytes) -> None:
    server = await serving()
    before = REFUSED.labels("agent")._value.get()
    async with connected(server, "agent") as websocket:
        await websocket.send_bytes(frame)
        answer = await websocket.receive()
        (reject,) = frame_decoder(ToAgent).decode(answer.data)
        assert (await websocket.receive()).type is aiohttp.WSMsgType.CLOSE
    assert reject.fatal and reject.reason.startswith("the frame does not follow the protocol of this version: ")
    assert "\n" not in reject.reason and REFUSED.labels("agent")._value.get() == before + 1
    assert not server.world.run.failure


@pytest.mark.parametrize("text", [b"hello", b"\xff\xfe"], ids=["text", "not UTF-8"])
async def test_a_text_frame_is_refused(serving: Any, text: bytes, caplog: pytest.LogCaptureFixture) -> None:
    server = await serving()
    async with connected(server, "agent") as websocket:
        await websocket._writer.send_frame(text, aiohttp.WSMsgType.TEXT)
        (reject,) = frame_decoder(ToAgent).decode((await websocket.receive()).data)
        assert reject.fatal
    assert "Traceback" not in caplog.text


async def test_a_websocket_without_a_message_is_closed(serving: Any) -> None:
    server = await serving()
    async with connected(server, "runner") as websocket:
        (protocol,) = server.server_state.connections
        timer = protocol._connection._timer
        timer._callback(*timer._args)  # its time ends now
        assert (await websocket.receive()).type in (aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.CLOSE)
    assert server.open_connections.refused == {"a WebSocket without a message after 20 s": 1}


async def test_the_first_message_of_a_websocket_ends_its_time(serving: Any) -> None:
    server = await serving()
    async with connected(server, "runner") as websocket:
        (protocol,) = server.server_state.connections
        assert protocol._connection._timer is not None
        await websocket.send_bytes(encode_frame([RegisterRunner("r", 1, {})]))
        assert (await websocket.receive()).type is aiohttp.WSMsgType.BINARY
        assert protocol._connection._timer is None and protocol._connection.has_token


async def test_no_byte_of_a_frame_is_read_before_the_token_is_checked() -> None:
    deciding, sent = asyncio.Event(), 64 << 20

    async def undecided(scope: Any, receive: Any, send: Any) -> None:
        await deciding.wait()
        await send({"type": "websocket.close"})

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = HttpServer(undecided, signals=False, ws=WebSocketProtocol, lifespan="off", log_config=None)
        running = asyncio.create_task(server.serve([listener]))
        await server.listening.wait()
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(
            b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        while not server.server_state.tasks:
            await asyncio.sleep(0)
        writer.write(b"\x82\xff" + sent.to_bytes(8, "big") + b"mask" + bytes(sent))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(writer.drain(), 0.2)
        assert writer.transport.get_write_buffer_size() > sent // 2, "the kernel holds the rest"
        deciding.set()
        with contextlib.suppress(ConnectionError):
            assert (await reader.readline()).startswith(b"HTTP/1.1 403 ")
        writer.transport.abort()
        server.should_exit = True
        await running


async def test_a_process_of_the_job_connects_during_a_flood(serving: Any) -> None:
    server = await serving(connections=4)
    flood = [await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2])) for _ in range(40)]
    for _, writer in flood[::2]:
        writer.write(b"GET /v1/connect/agent HTTP/1.1\r\nHost: x\r\nX: ")
    async with connected(server, "runner") as websocket:
        await websocket.send_bytes(encode_frame([RegisterRunner("r", 1, {})]))
        assert (await websocket.receive()).type is aiohttp.WSMsgType.BINARY, "it is registered and gets work"
    assert len(server.open_connections) <= 4
    for _, writer in flood:
        writer.transport.abort()
