"""Asks for the server's key on every route.

vLLM's own check covers /v1, /v2, /inference and /cohere only: the routes of its development mode, which change weights
and call methods of the workers, are open to whoever reaches the port.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Application = Callable[[Scope, Any, Any], Awaitable[None]]

KEY_VARIABLE = "VLLM_API_KEY"  # vLLM's own; in the environment because anybody may read a command line


class RequireKey:
    """ASGI middleware: 401 unless the request carries ``Authorization: Bearer KEY``."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[KEY_VARIABLE]}".encode()

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Serve one request or refuse it."""
        if scope["type"] in ("http", "websocket"):
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not secrets.compare_digest(given, self._expected):
                await _refuse(scope, send)
                return
        await self._app(scope, receive, send)


async def _refuse(scope: Scope, send: Any) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})
