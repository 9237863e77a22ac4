"""What a peer without a token can take of an HTTP server: little memory, few connections, for a short time."""

import asyncio
import contextlib
import dataclasses
import logging

import pytest

from e2e.fakes.served import closed, connect, served
from rljob.protocol import connection_limits
from rljob.protocol.connection_limits import (
    NO_DESCRIPTORS,
    NOT_READ,
    TOO_MANY,
    HttpLimits,
    OpenConnection,
    OpenConnections,
)
from rljob.protocol.http_server import INVALID_REQUEST, HttpServer, token_check
from rljob.protocol.request_limits import DROPPED, LONG_HEAD, TOO_BUSY

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


def serving(app, **limits):
    """Return the context of a running server; it has the usual limits but for ``limits``."""
    check, limits = token_check(["other", "secret"]), dataclasses.replace(HttpLimits(), **limits)
    return served(lambda: HttpServer(app, limits, check, signals=False, lifespan="off", log_config=None))


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


async def test_headers_up_to_the_limit_are_accepted_in_parts():
    async with serving(App()) as server:
        reader, writer = await connect(server, b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 60_000)
        await received(server, b"aaa")
        writer.write(b"\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")


async def test_an_invalid_body_is_refused_without_a_traceback(caplog):
    async def not_found(scope, receive, send):
        await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async with serving(not_found) as server:
        assert await ask(server, CHUNKED + b"zz\r\n") == 400
        assert server.open_connections.refused == {INVALID_REQUEST: 1}
    assert not any(record.exc_info for record in caplog.records), caplog.text


async def test_long_headers_in_one_part_are_refused():
    async with serving(App(), head_bytes=1000) as server:
        long = b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 1000 + b"\r\n\r\n"
        assert await ask(server, long) == 431
        assert await ask(server, b"GET /" + b"a" * 1000 + b" HTTP/1.1\r\nHost: x\r\n\r\n") == 431
        assert await ask(server) == 200
        assert server.open_connections.refused == {LONG_HEAD: 2}


async def received(server, part, phase="head"):
    """Return the server's only connection when it has received ``part`` and waits for the rest of the request."""
    while not server.server_state.connections:
        await asyncio.sleep(0)
    (protocol,) = server.server_state.connections
    while protocol._phase != phase or not protocol.conn.trailing_data[0].endswith(part):
        await asyncio.sleep(0)
    return protocol


def expire(protocol):
    """Let the time of a connection end now."""
    timer = protocol.connection._timer
    timer._callback(*timer._args)


@pytest.mark.parametrize(
    "request_before, part, problem",
    [
        (b"", b"", "incomplete headers after 10 s"),
        (b"", b"GET / HT", "incomplete headers after 10 s"),
        (GET, b"GET / HT", "incomplete headers after 10 s"),
        (POST % 10 + b"hal", b"", "incomplete body after 30 s"),
        (CHUNKED, b"4\r", "incomplete body after 30 s"),
    ],
)
async def test_half_a_request_is_closed_after_its_time(request_before, part, problem):
    async with serving(App()) as server:
        reader, writer = await connect(server, request_before)
        if request_before == GET:
            await reader.readuntil(b"\r\n\r\n0")
        writer.write(part)
        expire(await received(server, part, "body" if "body" in problem else "head"))
        await closed(reader)
        assert server.open_connections.refused == {problem: 1}
        assert len(server.open_connections) == 0


async def test_more_bytes_do_not_extend_the_time_of_a_request():
    async with serving(App()) as server:
        _, writer = await connect(server)
        timer = (await received(server, b"")).connection._timer
        writer.write(b"GET / HTTP/1.1\r\nX: ")
        assert (await received(server, b"X: ")).connection._timer is timer
        writer.write(b"abc")
        assert (await received(server, b"abc")).connection._timer is timer


async def test_an_answer_has_no_deadline():
    app = App()
    app.hold = asyncio.Event()
    async with serving(app) as server:
        asking = asyncio.create_task(ask(server))
        await app.started.wait()
        (protocol,) = server.server_state.connections
        assert protocol.connection._timer is None and protocol.connection.answering
        app.hold.set()
        assert await asking == 200


async def test_a_large_body_is_refused_before_it_is_received():
    app = App()
    async with serving(app, body_bytes=1000, drain_seconds=0.0) as server:
        reader, _ = await connect(server, POST % 1001)
        assert (await closed(reader)).startswith(b"HTTP/1.1 413 ")
        reader, _ = await connect(server, CHUNKED + b"3e9\r\n" + b"x" * 1001)
        assert (await closed(reader)).startswith(b"HTTP/1.1 413 ")
        assert app.sizes == [] and await ask(server, POST % 1000 + b"x" * 1000) == 200
        assert server.open_connections.refused == {"a body of more than 1000 bytes": 2}


async def refuse_without_reading(scope, receive, send):
    headers = [(b"content-length", b"0"), (b"connection", b"close")]  # the client may ask for it, too
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize(("app", "most", "status"), [(App(), 1000, 413), (refuse_without_reading, 64 << 20, 401)])
async def test_a_peer_that_still_sends_a_refused_body_gets_the_answer(app, most, status):
    async with serving(app, body_bytes=most, drain_seconds=60.0) as server:
        for sent in (POST % (8 << 20) + bytes(8 << 20), CHUNKED + (b"100000\r\n" + bytes(1 << 20) + b"\r\n") * 8):
            reader, writer = await connect(server, sent)
            await writer.drain()  # raises ConnectionResetError if the server closes the connection
            writer.write(b"0\r\n\r\n" if sent.startswith(CHUNKED) else b"")
            assert (await reader.readline()).startswith(b"HTTP/1.1 %d " % status)


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


async def half_a_body(server, sent, missing=4, head=POST):
    """Return reader and writer of a request with ``sent`` bytes of its body, which the application has received."""
    reader, writer = await connect(server, head % (sent + missing) + bytes(sent))
    bodies = server.config.app._bodies
    while not bodies or [*bodies][-1].size != sent:
        await asyncio.sleep(0)
    return reader, writer


async def test_incomplete_bodies_do_not_keep_out_a_later_request():
    app = App()
    async with serving(app, body_bytes=1000, all_bodies_bytes=4000) as server:
        early = [await half_a_body(server, 996 - i) for i in range(4)]
        assert await ask(server, POST % 500 + bytes(500)) == 200
        await closed(early[0][0])
        assert server.open_connections.refused == {DROPPED: 1}
        for i, (reader, writer) in enumerate(early[1:], start=1):
            writer.write(bytes(4))
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 "), i
        assert app.sizes == [500, 999, 998, 997]


async def test_an_announced_body_takes_no_memory_of_others():
    async with serving(App(), body_bytes=1000, all_bodies_bytes=1000) as server:
        early = await half_a_body(server, 990)
        later = await connect(server, POST % 1000)
        while len(server.config.app._bodies) < 2:
            await asyncio.sleep(0)
        early[1].write(bytes(4))
        assert (await early[0].readline()).startswith(b"HTTP/1.1 200 ")
        later[1].write(bytes(1000))
        assert (await later[0].readline()).startswith(b"HTTP/1.1 200 ")


async def test_an_early_incomplete_body_that_grows_is_refused_instead_of_a_later_one():
    async with serving(App(), body_bytes=1000, all_bodies_bytes=1000, drain_seconds=0.0) as server:
        reader, writer = await half_a_body(server, 600, missing=400)
        later, last = await half_a_body(server, 390)
        writer.write(bytes(11))
        assert (await reader.readline()).startswith(b"HTTP/1.1 503 ")
        last.write(bytes(4))
        assert (await later.readline()).startswith(b"HTTP/1.1 200 ")
        assert server.open_connections.refused == {TOO_BUSY: 1}


async def test_an_incomplete_body_with_a_token_is_not_dropped():
    head = WITH_TOKEN[:-2].replace(b"GET", b"POST") + b"Content-Length: %d\r\n\r\n"
    async with serving(App(), body_bytes=1000, all_bodies_bytes=1000) as server:
        reader, writer = await half_a_body(server, 990, head=head)
        assert await ask(server, POST % 500 + bytes(500)) == 503
        writer.write(bytes(4))
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
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
        await reader.readuntil(b"\r\n\r\n0")
        for _ in range(50):
            await connect(server)
        while server.open_connections.refused[TOO_MANY] < 46:
            await asyncio.sleep(0)
        assert await ask(server, WITH_TOKEN) == 200
        writer.write(WITH_TOKEN)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        assert len(server.open_connections) <= 4


class Transport:
    """A transport of a socket with this descriptor."""

    def __init__(self, descriptor):
        self.descriptor, self.aborted, self.unread = descriptor, False, 0

    def get_extra_info(self, name):
        return self

    def fileno(self):
        return self.descriptor

    def get_write_buffer_size(self):
        return self.unread

    def abort(self):
        self.aborted = True


def opened(connections, descriptor, **state):
    """Return a new connection and its transport."""
    connection, transport = OpenConnection(connections), Transport(descriptor)
    connection.opened(transport)
    for name, value in state.items():
        setattr(connection, name, value)
    return connection, transport


def test_of_connections_that_are_all_answered_one_that_does_not_read_is_closed():
    connections = OpenConnections(HttpLimits(connections=2))
    _, reading = opened(connections, 10, answering=True)
    _, silent = opened(connections, 11, answering=True)
    silent.unread = 1
    _, newest = opened(connections, 12)
    assert [reading.aborted, silent.aborted, newest.aborted] == [False, True, False]
    assert connections.refused == {TOO_MANY: 1}


def test_connections_leave_descriptors_free(monkeypatch):
    monkeypatch.setattr(connection_limits, "_descriptor_limit", lambda: 64)
    connections = OpenConnections(HttpLimits(free_descriptors=16))
    early = [opened(connections, descriptor) for descriptor in range(40, 48)]
    assert not connections.refused
    newest = [opened(connections, descriptor) for descriptor in (48, 49)]
    assert [transport.aborted for _, transport in early] == [True, True] + [False] * 6
    for connection, _ in early[:2]:
        connection.closed()
    opened(connections, 40)
    assert connections.refused == {NO_DESCRIPTORS: 2}, "one descriptor is free again"
    assert not any(transport.aborted for _, transport in newest)


def test_as_many_connections_are_closed_as_descriptors_are_missing(monkeypatch):
    connections = OpenConnections(HttpLimits(free_descriptors=16))
    early = [opened(connections, descriptor, answering=descriptor == 42) for descriptor in range(40, 50)]
    monkeypatch.setattr(connection_limits, "_descriptor_limit", lambda: 64)
    _, newest = opened(connections, 53)
    assert [transport.descriptor for _, transport in early if transport.aborted] == [40, 41, 43, 44, 45, 46]
    assert not newest.aborted
    for connection, _ in early:
        connection.answering = True
    _, refused = opened(connections, 60)
    assert newest.aborted and refused.aborted, "all others are being answered"


async def test_an_answer_that_nobody_reads_is_dropped():
    async with serving(App(b"x" * (32 << 20)), stalled_seconds=SHORT) as server:
        _reader, writer = await connect(server)
        writer.transport.pause_reading()
        writer.write(GET)
        while not server.open_connections.refused:
            await asyncio.sleep(SHORT)
        assert server.open_connections.refused == {NOT_READ: 1}


async def test_a_peer_that_reads_slowly_keeps_its_connection():
    connection, transport = opened(OpenConnections(HttpLimits()), 3)
    transport.get_write_buffer_size = lambda: 100
    connection._check_progress(200)
    assert not transport.aborted and connection._timer is not None
    connection._check_progress(100)
    assert transport.aborted and connection._timer is None


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
