"""What a peer without a token can take of an HTTP server: little memory, few connections, for a short time."""

import asyncio
import contextlib
import dataclasses
import logging
import socket

import pytest

from rljob.protocol import connection_limits
from rljob.protocol.connection_limits import NO_DESCRIPTORS, NOT_READ, TOO_MANY, HttpLimits
from rljob.protocol.http_server import INVALID_REQUEST, HttpServer, token_check
from rljob.protocol.request_limits import LONG_HEAD, TOO_BUSY

SHORT = 0.05
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
WITH_TOKEN = b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


class App:
    """Answers each request with the size of its body, after ``hold`` if it is set; ``sizes`` lists the bodies."""

    def __init__(self, answer=b""):
        self.hold = None
        self.answer = answer
        self.sizes = []
        self.started = asyncio.Event()

    async def __call__(self, scope, receive, send):
        size, more = 0, True
        while more:
            event = await receive()
            if event["type"] == "http.disconnect":
                raise ConnectionError("the body is incomplete")
            size, more = size + len(event["body"]), event["more_body"]
        self.sizes.append(size)
        self.started.set()
        if self.hold is not None:
            await self.hold.wait()
        body = self.answer or b"%d" % size
        length = str(len(body)).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
        await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def serving(app, **limits):
    """Yield a running server; it has the usual limits but for ``limits``."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = HttpServer(
            app,
            dataclasses.replace(HttpLimits(), **limits),
            token_check(["other", "secret"]),
            signals=False,
            lifespan="off",
            log_config=None,
        )
        server.address, server.clients = listener.getsockname(), []
        running = asyncio.create_task(server.serve([listener]))
        await server.listening.wait()
        yield server
        for client in server.clients:
            client.transport.abort()
        server.should_exit = True
        await running


async def connect(server, data=b""):
    reader, writer = await asyncio.open_connection(*server.address)
    server.clients.append(writer)
    writer.write(data)
    return reader, writer


async def ask(server, data=GET):
    """Return the status of a request's answer, 0 if the connection is closed without one."""
    reader, writer = await connect(server, data)
    try:
        with contextlib.suppress(ConnectionError):
            line = await reader.readline()
            return int(line.split()[1]) if line else 0
        return 0
    finally:
        writer.transport.abort()


async def closed(reader):
    """Wait until the server closes the connection; return what it sent before."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""


async def waiting(server, count):
    """Wait until the server has ``count`` connections without a token."""
    while len(server.open_connections) != count:
        await asyncio.sleep(0)


async def test_headers_without_an_end_are_refused():
    async with serving(App()) as server:
        reader, writer = await connect(server, b"GET / HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                writer.write(b"X-Filler: " + b"a" * 1000 + b"\r\n")
                await writer.drain()
                await asyncio.sleep(0)
        await closed(reader)
        assert server.open_connections.refused == {INVALID_REQUEST: 1}


async def test_long_headers_in_one_part_are_refused():
    async with serving(App(), head_bytes=1000) as server:
        long = b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 1000 + b"\r\n\r\n"
        assert await ask(server, long) == 431
        assert await ask(server, b"GET /" + b"a" * 1000 + b" HTTP/1.1\r\nHost: x\r\n\r\n") == 431
        assert await ask(server) == 200
        assert server.open_connections.refused == {LONG_HEAD: 2}


@pytest.mark.parametrize(
    "part, problem",
    [
        (b"", "incomplete headers"),
        (b"GET / HT", "incomplete headers"),
        (GET + b"GET / HT", "incomplete headers"),
        (POST % 10 + b"half", "incomplete body"),
        (CHUNKED + b"4\r\nha", "incomplete body"),
    ],
)
async def test_half_a_request_is_closed_after_its_time(part, problem):
    async with serving(App(), head_seconds=SHORT, body_seconds=SHORT, idle_seconds=60) as server:
        reader, writer = await connect(server)
        for byte in (part[i : i + 1] for i in range(len(part))):
            writer.write(byte)
            await asyncio.sleep(0)
        await closed(reader)
        assert server.open_connections.refused == {f"{problem} after {SHORT:g} s": 1}
        assert len(server.open_connections) == 0


async def test_more_bytes_do_not_extend_the_time_of_a_request():
    async with serving(App(), head_seconds=SHORT) as server:
        reader, writer = await connect(server, b"GET / HTTP/1.1\r\nX: ")
        ending = asyncio.create_task(closed(reader))
        while not ending.done():
            writer.write(b"a")
            await asyncio.sleep(SHORT / 10)
        assert len(server.open_connections) == 0


async def test_the_time_for_an_answer_is_not_limited():
    app = App()
    app.hold = asyncio.Event()
    async with serving(app, head_seconds=SHORT, body_seconds=SHORT, stalled_seconds=SHORT) as server:
        asking = asyncio.create_task(ask(server))
        await asyncio.sleep(3 * SHORT)
        app.hold.set()
        assert await asking == 200


async def test_a_large_body_is_refused_before_it_is_received():
    app = App()
    async with serving(app, body_bytes=1000) as server:
        reader, _ = await connect(server, POST % 1001)
        assert (await closed(reader)).startswith(b"HTTP/1.1 413 ")
        reader, _ = await connect(server, CHUNKED + b"3e9\r\n" + b"x" * 1001)
        assert (await closed(reader)).startswith(b"HTTP/1.1 413 ")
        assert app.sizes == [] and await ask(server, POST % 1000 + b"x" * 1000) == 200
        assert server.open_connections.refused == {"a body of more than 1000 bytes": 2}


async def test_the_bodies_of_all_requests_are_limited_together():
    app = App()
    app.hold = asyncio.Event()
    async with serving(app, body_bytes=1000, all_bodies_bytes=1500) as server:
        asking = asyncio.create_task(ask(server, POST % 1000 + b"x" * 1000))
        await app.started.wait()
        assert await ask(server, POST % 501 + b"x" * 501) == 503
        app.hold.set()
        assert await asking == 200
        assert await ask(server, POST % 501 + b"x" * 501) == 200, "the memory of the first body is free again"
        assert server.open_connections.refused == {TOO_BUSY: 1}


async def test_of_too_many_connections_the_oldest_is_closed():
    async with serving(App(), connections=3) as server:
        silent = [await connect(server) for _ in range(3)]
        await waiting(server, 3)
        assert await ask(server) == 200
        await closed(silent[0][0])
        assert server.open_connections.refused == {TOO_MANY: 1}
        assert not silent[1][0].at_eof()


async def test_a_connection_that_is_answered_is_not_closed_for_a_new_one():
    app = App()
    app.hold = asyncio.Event()
    async with serving(app, connections=1) as server:
        asking = asyncio.create_task(ask(server))
        await app.started.wait()
        assert await ask(server) == 0
        app.hold.set()
        assert await asking == 200


async def test_a_flood_does_not_close_or_keep_out_connections_with_a_token():
    async with serving(App(), connections=4) as server:
        reader, writer = await connect(server, WITH_TOKEN)
        await reader.readuntil(b"0")
        flood = [await connect(server) for _ in range(50)]
        assert await ask(server, WITH_TOKEN) == 200
        writer.write(WITH_TOKEN)
        assert (await reader.readline()) or (await reader.readline())
        assert len(server.open_connections) <= 4
        assert sum(await asyncio.gather(*(_is_closed(reader) for reader, _ in flood))) >= 46


async def _is_closed(reader):
    try:
        async with asyncio.timeout(0.01):
            return await reader.read() == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


async def test_connections_leave_descriptors_free(monkeypatch):
    async with serving(App()) as server:
        first, _ = await connect(server)
        await waiting(server, 1)
        with socket.socket() as probe:
            monkeypatch.setattr(connection_limits, "_descriptor_limit", lambda: probe.fileno() + 1 + 16)
        assert await ask(server) == 200
        await closed(first)
        assert server.open_connections.refused == {NO_DESCRIPTORS: 1}


async def test_an_answer_that_nobody_reads_is_dropped():
    async with serving(App(b"x" * (32 << 20)), stalled_seconds=SHORT) as server:
        _reader, writer = await connect(server)
        writer.transport.pause_reading()
        writer.write(GET)
        while not server.open_connections.refused:
            await asyncio.sleep(SHORT)
        assert server.open_connections.refused == {NOT_READ: 1}


async def test_a_slow_reader_gets_its_whole_answer():
    async with serving(App(b"x" * (16 << 20)), stalled_seconds=SHORT) as server:
        reader, _writer = await connect(server, GET)
        size = 0
        while part := await reader.read(1 << 20):
            size += len(part)
            await asyncio.sleep(SHORT / 8)
            if size > 16 << 20:
                break
        assert size > 16 << 20 and not server.open_connections.refused


async def test_invalid_requests_fill_no_log(caplog):
    async with serving(App()) as server:
        for _ in range(5):
            assert await ask(server, b"\0\0\r\n\r\n") == 400
            assert await ask(server, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n") == 200
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        f"refused a connection: {INVALID_REQUEST}; further ones are counted, not logged"
    ]
    assert server.open_connections.refused == {INVALID_REQUEST: 5}


@pytest.mark.parametrize(
    "value, valid",
    [("Bearer secret", True), ("Bearer other", True), ("Bearer ", False), ("secret", False), ("", False)],
)
def test_a_token_is_one_of_the_jobs(value, valid):
    assert token_check(["other", "secret"])(value) is valid
    assert not token_check([])(value)
