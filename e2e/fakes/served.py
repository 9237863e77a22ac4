"""A server of uvicorn in the test's own event loop, and raw connections to it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any


@contextlib.asynccontextmanager
async def served(make: Callable[[], Any]) -> AsyncIterator[Any]:
    """Yield the running server that ``make`` returns. It gets ``address``, and ``clients``, which end before it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = make()
        server.address, server.clients = listener.getsockname(), []
        running = asyncio.create_task(server.serve([listener]))
        while not server.started:
            await asyncio.sleep(0)
        try:
            yield server
        finally:
            for client in server.clients:
                client.transport.abort()
            server.should_exit = True
            await running


async def connect(server: Any, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a connection on which ``data`` has been sent, before the server's times begin as far as possible."""
    connection = socket.create_connection(server.address)
    connection.setblocking(False)
    sent = connection.send(data)
    reader, writer = await asyncio.open_connection(sock=connection)
    server.clients.append(writer)
    writer.write(data[sent:])
    return reader, writer


async def closed(reader: asyncio.StreamReader) -> bytes:
    """Wait until the server closes the connection; return what it sent before."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""
