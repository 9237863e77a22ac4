"""TLS of a server: a peer without a handshake takes as little as one without a request; renewed certificates."""

import asyncio
import contextlib
import dataclasses
import functools
import socket
import ssl

import aiohttp
import pytest

from core.tests.certificates import certificate
from rljob.protocol.connection_limits import TOO_MANY, HttpLimits
from rljob.protocol.http_server import HttpServer
from rljob.protocol.tls_connection import FAILED_HANDSHAKE, INCOMPLETE_HANDSHAKE, ServerCertificate, TlsProtocol

SHORT = 0.05
HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return certificate(tmp_path_factory.mktemp("tls") / "first", "DNS:hook.example")


async def hello(_scope, _receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


@contextlib.asynccontextmanager
async def serving(files, **limits):
    """Yield a running server with TLS; it has the usual limits but for ``limits``."""
    protocol = functools.partial(TlsProtocol, ServerCertificate(*files))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        chosen = dataclasses.replace(HttpLimits(), **limits)
        server = HttpServer(hello, chosen, signals=False, lifespan="off", log_config=None, http=protocol)
        server.address = listener.getsockname()
        running = asyncio.create_task(server.serve([listener]))
        await server.listening.wait()
        try:
            yield server
        finally:
            server.should_exit = True
            await running


async def ask(server, authority):
    """Return the body of an answer to a client that trusts ``authority``."""
    trust = ssl.create_default_context(cafile=str(authority))
    url = f"https://127.0.0.1:{server.address[1]}/"
    async with aiohttp.ClientSession() as session, session.get(url, ssl=trust, server_hostname="hook.example") as found:
        return await found.text()


async def closed(server, data=b""):
    """Return what a peer without TLS receives until the server closes the connection."""
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(data)
    try:
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


async def test_a_request_is_answered_over_tls(made):
    async with serving(made) as server:
        assert await ask(server, made[0]) == "hello"
        assert server.open_connections.refused == {}
    assert len(server.open_connections) == 0


async def test_a_request_that_arrives_with_the_end_of_the_handshake_is_answered(made):
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context(cafile=str(made[0])).wrap_bio(incoming, outgoing, False, "hook.example")
    async with serving(made, drain_seconds=SHORT) as server:
        reader, writer = await asyncio.open_connection(*server.address)

        async def until(step):
            """Return the result of a step of TLS, which may need more of the server."""
            while True:
                try:
                    return step()
                except ssl.SSLWantReadError:
                    writer.write(outgoing.read())
                    incoming.write(await reader.read(1 << 16))

        try:
            await until(client.do_handshake)
            client.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            # Its next packet has the last message of the handshake and the request.
            assert (await until(lambda: client.read(1 << 10))).startswith(HEAD)
        finally:
            writer.transport.abort()


async def test_a_peer_that_starts_no_handshake_is_closed_at_the_deadline(made):
    async with serving(made, head_seconds=SHORT) as server:
        assert await closed(server) == b""
        assert server.open_connections.refused == {f"{INCOMPLETE_HANDSHAKE} after {SHORT:g} s": 1}
        assert await ask(server, made[0]) == "hello"


async def test_connections_are_counted_before_their_handshake(made):
    async with serving(made, connections=2) as server:
        peers = [asyncio.create_task(closed(server)) for _ in range(4)]
        done, waiting = await asyncio.wait(peers, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        while server.open_connections.refused[TOO_MANY] < 2:
            await asyncio.sleep(0)
        assert len(server.open_connections) == 2 and done
        assert await ask(server, made[0]) == "hello", "a flood does not keep others from connecting"
        for peer in waiting:
            peer.cancel()
        await asyncio.gather(*peers, return_exceptions=True)


async def test_a_peer_without_tls_is_closed_and_counted(made):
    async with serving(made) as server:
        assert b"HTTP" not in await closed(server, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert server.open_connections.refused == {FAILED_HANDSHAKE: 1}
        assert len(server.open_connections) == 0


async def test_a_renewed_certificate_is_used_for_new_connections(made, tmp_path):
    files = tmp_path / "tls.crt", tmp_path / "tls.key"
    second = certificate(tmp_path / "second", "DNS:hook.example")

    def write(pair):
        for target, source in zip(files, pair, strict=True):
            target.write_bytes(source.read_bytes())

    write(made)
    async with serving(files) as server:
        assert await ask(server, made[0]) == "hello"
        files[0].write_text("half")
        assert await ask(server, made[0]) == "hello", "the last certificate stays in use"
        write(second)
        assert await ask(server, second[0]) == "hello"
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await ask(server, made[0])


def test_a_certificate_without_its_key_is_one_sentence(made, tmp_path):
    other = certificate(tmp_path / "other", "DNS:other")
    for pair in ((made[0], other[1]), (tmp_path / "none", made[1]), (made[0], made[0])):
        with pytest.raises(ValueError, match="no certificate with its key: ") as refusal:
            ServerCertificate(*pair)
        assert str(pair[0]) in str(refusal.value) and "\n" not in str(refusal.value)
