"""ASGI middleware of every HTTP server: finds requests with a token, and limits the bodies of all requests.

A process of the job sends its body at once. If the bodies of all requests exceed the memory for them, the one that has
been incomplete for the longest time, of a peer without a token, is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
DROPPED = "an incomplete body whose memory a later request needs"
DRAINED_BYTES = 64 << 20
"""Of a body that the application does not read, these are received and dropped. Closing a connection with unread bytes
resets it, and a peer that still sends would get an error of its connection instead of the answer."""


@dataclass(eq=False)
class _Body:
    connection: OpenConnection
    complete: bool
    size: int = 0
    """Bytes received."""
    refused: bool = False

    @property
    def dispensable(self) -> bool:
        """Whether its memory may be given to another body."""
        return self.size > 0 and not self.complete and not self.connection.has_token


class RequestLimits:
    """ASGI application that checks the token of a request, and refuses large bodies before they are received."""

    def __init__(self, app: ASGI3Application, limits: HttpLimits, is_token: Callable[[str], bool]) -> None:
        self._app = app
        self._limits = limits
        self._is_token = is_token
        self._bodies: dict[_Body, None] = {}
        """Of the requests that are received or answered, oldest first."""
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
        announced = int(headers.get(b"content-length", b"0"))
        body = _Body(connection, complete=not announced and b"transfer-encoding" not in headers)
        started, too_large = False, f"a body of more than {self._limits.body_bytes} bytes"

        async def answer(event: ASGISendEvent) -> None:
            nonlocal started
            started = True
            if event["type"] == "http.response.body" and not event.get("more_body", False) and not body.complete:
                await send({"type": "http.response.body", "body": event.get("body", b""), "more_body": True})
                await self._drain(receive)
                event = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(event)

        async def refuse(status: int, problem: str) -> ASGIReceiveEvent:
            """Answer for the application; return what it receives instead of the body."""
            body.refused = True
            connection.count(problem)
            if not started:
                await _answer(answer, status, f"{problem}\n".encode())
            return {"type": "http.disconnect"}

        async def limited_receive() -> ASGIReceiveEvent:
            if body.refused:
                return {"type": "http.disconnect"}
            event = await receive()
            if body.refused:  # meanwhile, because its connection was dropped
                return {"type": "http.disconnect"}
            length = body.size + len(event["body"] if event["type"] == "http.request" else b"")
            body.complete = body.complete or event["type"] != "http.request" or not event["more_body"]
            if length > self._limits.body_bytes:
                return await refuse(413, too_large)
            if not self._make_room(body, length):
                return await refuse(503, TOO_BUSY)
            self._resize(body, length)
            return event

        async def limited_send(event: ASGISendEvent) -> None:
            if not body.refused:
                await answer(event)

        self._bodies[body] = None
        try:
            if announced > self._limits.body_bytes:
                await refuse(413, too_large)
            else:
                await self._app(scope, limited_receive, limited_send)
        except Exception:
            if not body.refused:  # else the application reports that the rest of the body is missing
                raise
        finally:
            self._resize(body, 0)
            del self._bodies[body]

    def _make_room(self, body: _Body, length: int) -> bool:
        """Return whether ``body`` may have ``length`` bytes. For them the oldest incomplete bodies of peers without a
        token are dropped, with their connections; if it is the oldest itself, it may not."""
        most = self._limits.all_bodies_bytes - length + body.size
        while self._bodies_bytes > most:
            oldest = next((each for each in self._bodies if each.dispensable), None)
            if oldest is None or oldest is body:
                return False
            oldest.refused = True
            oldest.connection.close(DROPPED)
            self._resize(oldest, 0)
        return True

    def _resize(self, body: _Body, size: int) -> None:
        self._bodies_bytes += size - body.size
        body.size = size

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
