"""ASGI middleware of every HTTP server: finds requests with a token, and limits the bodies of all requests."""

from __future__ import annotations

from collections.abc import Callable
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
            await self._with_body(scope, receive, send, connection, int(headers.get(b"content-length", b"0")))

    async def _with_body(
        self,
        scope: HTTPScope,
        receive: ASGIReceiveCallable,
        send: ASGISendCallable,
        connection: OpenConnection,
        announced: int,
    ) -> None:
        """Call the application with a body of bounded size, or answer 413 or 503."""
        size, started, refused = 0, False, False

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
                await _answer(send, status, f"{problem}\n".encode())
            return True

        async def limited_receive() -> ASGIReceiveEvent:
            nonlocal size
            if refused:
                return {"type": "http.disconnect"}
            event = await receive()
            length = size + len(event["body"] if event["type"] == "http.request" else b"")
            if await refuse(length):
                return {"type": "http.disconnect"}
            self._bodies_bytes += length - size
            size = length
            return event

        async def limited_send(event: ASGISendEvent) -> None:
            nonlocal started
            if not refused:
                started = True
                await send(event)

        if await refuse(announced):
            return
        try:
            await self._app(scope, limited_receive, limited_send)
        except Exception:
            if not refused:  # else the application reports that the rest of the body is missing
                raise
        finally:
            self._bodies_bytes -= size


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
