"""A process's link to the coordinator, with a real WebSocket server in the same process."""

import asyncio
import contextlib
import itertools

import msgspec
import pytest
from aiohttp import web

from rljob.protocol import coordinator_link as link_module
from rljob.protocol.coordinator_link import CoordinatorLink, RefusedError
from rljob.protocol.frames import MESSAGES_PER_FRAME, encode_frame, frame_decoder
from rljob.protocol.runner_protocol import (
    AckTrajectories,
    Cancel,
    FromRunner,
    RegisterRunner,
    ToRunner,
    TrajectoryScored,
)
from rljob.protocol.shared_messages import Reject

REGISTER = RegisterRunner("r", 8, {})


class Server:
    """A coordinator for one connection at a time. ``sockets`` queues connections, ``frames`` received frames."""

    def __init__(self):
        self.sockets = asyncio.Queue()
        self.frames = asyncio.Queue()
        self.status = 200
        self.url = ""

    async def connect(self, request):
        assert request.path == "/v1/connect/runner"
        assert request.headers["Authorization"] == "Bearer secret"
        if self.status != 200:
            return web.Response(status=self.status)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.sockets.put_nowait(socket)
        async for frame in socket:
            self.frames.put_nowait(frame_decoder(FromRunner).decode(frame.data))
        return socket


@pytest.fixture
async def server(monkeypatch):
    monkeypatch.setattr(link_module, "FIRST_BACKOFF_SECONDS", 0.001)
    server = Server()
    app = web.Application()
    app.router.add_get("/v1/connect/{role}", server.connect)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/"
    yield server
    await runner.cleanup()


@contextlib.asynccontextmanager
async def linked(server, register=lambda: [REGISTER]):
    """Yield a link whose incoming messages are in the queue ``received``."""
    link = CoordinatorLink(server.url, "runner", "secret", ToRunner, register)
    link.received = asyncio.Queue()

    async def read():
        async for message in link.messages():
            link.received.put_nowait(message)

    link.reading = asyncio.create_task(read())
    try:
        yield link
    finally:
        link.reading.cancel()
        await asyncio.wait([link.reading])


async def test_the_registration_is_sent_first(server):
    async with linked(server, lambda: [REGISTER, TrajectoryScored("g1.0", 1.0, {}, "2", 1)]):
        assert await server.frames.get() == [REGISTER, TrajectoryScored("g1.0", 1.0, {}, "2", 1)]


async def test_messages_arrive_in_order_and_messages_of_one_loop_iteration_share_a_frame(server):
    async with linked(server) as link:
        socket = await server.sockets.get()
        await server.frames.get()
        scores = [TrajectoryScored(f"g{i}.0", 1.0, {}, "", 1) for i in range(3)]
        for message in scores:
            link.send(message)
        assert await server.frames.get() == scores
        await socket.send_bytes(encode_frame([Cancel(["a"]), AckTrajectories(["b"])]))
        assert [await link.received.get(), await link.received.get()] == [Cancel(["a"]), AckTrajectories(["b"])]


async def test_many_messages_are_split_into_frames(server):
    async with linked(server) as link:
        await server.frames.get()
        for i in range(MESSAGES_PER_FRAME + 1):
            link.send(TrajectoryScored(f"g{i}.0", 1.0, {}, "", 1))
        assert len(await server.frames.get()) == MESSAGES_PER_FRAME
        assert len(await server.frames.get()) == 1


async def test_after_a_disconnect_the_link_reconnects_and_registers_again(server):
    connects = itertools.count(1)

    def register():
        return [RegisterRunner("r", 8, {f"lease{next(connects)}": 1})]

    async with linked(server, register) as link:
        first = await server.sockets.get()
        assert (await server.frames.get())[0].driving == {"lease1": 1}
        await first.close()
        second = await server.sockets.get()
        assert (await server.frames.get())[0].driving == {"lease2": 1}
        link.send(TrajectoryScored("g1.0", 1.0, {}, "", 1))
        assert await server.frames.get() == [TrajectoryScored("g1.0", 1.0, {}, "", 1)]
        assert not second.closed


async def test_a_message_without_a_connection_is_dropped(server):
    link = CoordinatorLink(server.url, "runner", "secret", ToRunner, lambda: [REGISTER])
    link.send(TrajectoryScored("g1.0", 1.0, {}, "", 1))
    assert not link.connected
    assert link._outbox == []


async def test_an_unavailable_coordinator_is_retried(server):
    server.status = 503
    async with linked(server) as link:
        while server.sockets.empty() and not link.reading.done():
            server.status = 200
            await asyncio.sleep(0.001)
        await server.frames.get()


@pytest.mark.parametrize("status", [401, 403])
async def test_a_rejected_token_ends_the_link(server, status):
    server.status = status
    async with linked(server) as link:
        with pytest.raises(RefusedError, match=f"rejected this process's token \\(HTTP {status}\\)"):
            await link.reading


async def test_a_fatal_reject_ends_the_link_and_any_other_reject_is_logged(server, caplog):
    async with linked(server) as link:
        socket = await server.sockets.get()
        await socket.send_bytes(encode_frame([Reject("too many trajectories", fatal=False), Cancel(["a"])]))
        assert await link.received.get() == Cancel(["a"])
        assert "too many trajectories" in caplog.text
        await socket.send_bytes(encode_frame([Reject("a newer incarnation is registered", fatal=True)]))
        with pytest.raises(RefusedError, match="a newer incarnation is registered"):
            await link.reading


@pytest.mark.parametrize(
    "frame",
    [
        msgspec.msgpack.encode([["Dance", 1]]),
        b"\x91\x92\xa6Cancel\x91\xa2\xff\xfe",  # not UTF-8
        b"\x91\x93\xaeGenerateResult\xa1a\x95\x00\xc4\x00\xc4\x00\xa4stop" + b"\x91" * 100_000 + b"\xc0",
        b"\xdd\xff\xff\xff\xff",
    ],
    ids=["type", "text", "depth", "length"],
)
async def test_a_coordinator_of_another_protocol_ends_the_link(server, frame):
    async with linked(server) as link:
        socket = await server.sockets.get()
        await socket.send_bytes(frame)
        with pytest.raises(RefusedError, match="another version of the protocol"):
            await link.reading


async def test_the_sender_of_a_message_gets_its_encoding_error(server):
    async with linked(server) as link:
        await server.frames.get()
        with pytest.raises(TypeError, match="object"):
            link.send(TrajectoryScored("g1.0", object(), {}, "", 1))
        link.send(TrajectoryScored("g1.0", 1.0, {}, "", 1))
        assert await server.frames.get() == [TrajectoryScored("g1.0", 1.0, {}, "", 1)]


async def test_frames_stay_below_the_size_limit(server, monkeypatch):
    monkeypatch.setattr("rljob.protocol.frames.MAX_FRAME_BYTES", 4000)
    async with linked(server) as link:
        await server.frames.get()
        for size in (1500, 1500, 10, 3000, 10):
            link.send(TrajectoryScored("g1.0", 1.0, {}, "x" * size, 1))
        frames = [await server.frames.get() for _ in range(4)]
        assert [[len(message.text) for message in frame] for frame in frames] == [[1500], [1500, 10], [3000], [10]]
