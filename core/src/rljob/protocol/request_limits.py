"""ASGI middleware of every HTTP server: finds requests with a token, and limits the bodies of all requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rljob.protocol.connection_limits import HttpLimits, OpenConnection

if TYPE_CHECKING:
    from uvicorn._types import (
        ASGI3Application,
        ASGIReceiveCallable,
        ASGIReceiveEvent,
        ASGISendCallable,
        ASGISendEvent,
        HTTPScope,
        Scope,
    )

CONNECTION = "rljob.connection"
"""Key of the connection in a request's state."""
LONG_HEAD = "headers that are too long"
TOO_BUSY = "the bodies of all requests exceed the memory for them"
DRAINED_BYTES = 64 << 20
"""Of a body that the application does not read, these are received and dropped. Closing a connection with unread bytes
resets it, and a peer that still sends would get an error of its connection instead of the answer."""


class RequestLimits:
    """ASGI application that checks the token of a request, and refuses large bodies before they are received."""

    def __init__(self, app: ASGI3Application, limits: HttpLimits, is_token: Callable[[str], bool]) -> None:
        self._app = app
        self._limits = limits
        self._is_token = is_token
        self._bodies_bytes = 0

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        connection: OpenConnection = scope["state"][CONNECTION]
        if self._is_token(headers.get(b"authorization", b"").decode("latin-1")):
            connection.accept_token()
        if scope["type"] == "websocket":
            await self._app(scope, receive, send)
        elif _head_bytes(scope) > self._limits.head_bytes:  # h11 checks it only if headers come in several parts
            connection.count(LONG_HEAD)
            await _answer(send, 431, f"{LONG_HEAD}\n".encode())
        else:
            await self._with_body(scope, receive, send, connection, headers)

    async def _with_body(
        self,
        scope: HTTPScope,
        receive: ASGIReceiveCallable,
        send: ASGISendCallable,
        connection: OpenConnection,
        headers: Mapping[bytes, bytes],
    ) -> None:
        """Call the application with a body of bounded size, or answer 413 or 503. The end of an answer waits for the
        rest of the body, for a short time."""
        size, started, refused = 0, False, False
        announced = int(headers.get(b"content-length", b"0"))
        complete = not announced and b"transfer-encoding" not in headers

        async def answer(event: ASGISendEvent) -> None:
            nonlocal started
            started = True
            if event["type"] == "http.response.body" and not event.get("more_body", False) and not complete:
                await send({"type": "http.response.body", "body": event.get("body", b""), "more_body": True})
                await self._drain(receive)
                event = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(event)

        async def refuse(length: int) -> bool:
            """Answer for the application if the body is too large; return whether it is."""
            nonlocal refused
            if length > self._limits.body_bytes:
                status, problem = 413, f"a body of more than {self._limits.body_bytes} bytes"
            elif self._bodies_bytes - size + length > self._limits.all_bodies_bytes:
                status, problem = 503, TOO_BUSY
            else:
                return False
            refused = True
            connection.count(problem)
            if not started:
                await _answer(answer, status, f"{problem}\n".encode())
            return True

        async def limited_receive() -> ASGIReceiveEvent:
            nonlocal size, complete
            if refused:
                return {"type": "http.disconnect"}
            event = await receive()
            length = size + len(event["body"] if event["type"] == "http.request" else b"")
            complete = complete or event["type"] != "http.request" or not event["more_body"]
            if await refuse(length):
                return {"type": "http.disconnect"}
            self._bodies_bytes += length - size
            size = length
            return event

        async def limited_send(event: ASGISendEvent) -> None:
            if not refused:
                await answer(event)

        if await refuse(announced):
            return
        try:
            await self._app(scope, limited_receive, limited_send)
        except Exception:
            if not refused:  # else the application reports that the rest of the body is missing
                raise
        finally:
            self._bodies_bytes -= size

    async def _drain(self, receive: ASGIReceiveCallable) -> None:
        """Drop the rest of a body, for a short time."""
        left, more = DRAINED_BYTES, True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.drain_seconds):
                while more and left > 0:
                    event = await receive()
                    more = event["type"] == "http.request" and event["more_body"]
                    left -= len(event["body"]) if event["type"] == "http.request" else 0


def _head_bytes(scope: HTTPScope) -> int:
    return (
        len(scope["raw_path"])
        + len(scope["query_string"])
        + sum(len(key) + len(value) for key, value in scope["headers"])
    )


async def _answer(send: ASGISendCallable, status: int, body: bytes) -> None:
    headers = [
        (b"content-type", b"text/plain"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
