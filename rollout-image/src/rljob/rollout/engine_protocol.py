"""The limits of :mod:`rljob.protocol.connection_limits` for an engine's own HTTP server, which makes its own
configuration of uvicorn.

A connection has the key once :class:`rljob.rollout.auth_middleware.RequireKey` has accepted a request of it. An answer
has no time limit: a generation may take hours.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar

from rljob.protocol.connection_limits import HttpLimits, OpenConnections
from rljob.protocol.http_server import HttpProtocol, ServerConfig, ignore_warnings_about_peers

if TYPE_CHECKING:
    from uvicorn.server import ServerState


class EngineProtocol(HttpProtocol):
    """One connection. The server's headers and its connections with the key keep the times of its configuration."""

    limits: ClassVar[HttpLimits] = HttpLimits()

    def __init__(
        self,
        config: ServerConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        if not hasattr(config, "open_connections"):  # the first connection of this server
            config.open_connections = OpenConnections(self.limits)
            ignore_warnings_about_peers()
        super().__init__(config, server_state, app_state, _loop)

    def on_response_complete(self) -> None:
        """Let a peer without the key keep its idle connection for a short time only."""
        with_key = self.connection.has_token
        self.timeout_keep_alive = self.config.timeout_keep_alive if with_key else self.connection.limits.idle_seconds
        super().on_response_complete()
