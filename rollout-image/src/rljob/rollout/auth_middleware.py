"""Requires an engine server's key on every route.

An engine's own check may cover only some routes. Routes that change weights or call methods of the workers must not be
open to every process that can reach the port.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from rljob.protocol.connection_limits import OpenConnection
from rljob.protocol.request_limits import CONNECTION

Scope = MutableMapping[str, Any]
Application = Callable[[Scope, Any, Any], Awaitable[None]]


class RequireKey:
    """ASGI middleware: 401 unless the request carries ``Authorization: Bearer KEY``.

    Args:
        app: the server.
        key: of this start of the server.
    """

    def __init__(self, app: Application, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Serve one request or reject it."""
        if scope["type"] in ("http", "websocket"):
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not secrets.compare_digest(given, self._expected):
                await _reject(scope, send)
                return
            _accept(scope)
        await self._app(scope, receive, send)


def _accept(scope: Scope) -> None:
    """End the limits of the connection. A WebSocket may be idle, also before its first message."""
    connection: OpenConnection | None = scope.get("state", {}).get(CONNECTION)
    if connection is not None:  # None: an application that a test calls without a server
        connection.accept_token()
        if scope["type"] == "websocket":
            connection.clear_deadline()


async def _reject(scope: Scope, send: Any) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})
