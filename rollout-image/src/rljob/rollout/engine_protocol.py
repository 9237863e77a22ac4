"""The limits of :mod:`rljob.protocol.connection_limits` for an engine's own HTTP server, which makes its own
configuration of uvicorn.

A connection has the key once :class:`rljob.rollout.auth_middleware.RequireKey` has accepted a request of it. An answer
has no time limit: a generation may take hours.
"""

from __future__ import annotations

from typing import ClassVar

from rljob.protocol.connection_limits import HttpLimits, OpenConnections
from rljob.protocol.http_server import HttpProtocol, ServerConfig, ignore_warnings_about_peers


class EngineProtocol(HttpProtocol):
    """One connection. The server's headers and its connections with the key keep the times of its configuration."""

    limits: ClassVar[HttpLimits] = HttpLimits()

    @classmethod
    def open_connections_of(cls, config: ServerConfig) -> OpenConnections:
        """See :class:`HttpProtocol`. The first connection of a server makes them."""
        if not hasattr(config, "open_connections"):
            config.open_connections = OpenConnections(cls.limits)
            ignore_warnings_about_peers()
        return config.open_connections

    def on_response_complete(self) -> None:
        """Let a peer without the key keep its idle connection for a short time only."""
        with_key = self.connection.has_token
        self.timeout_keep_alive = self.config.timeout_keep_alive if with_key else self.connection.limits.idle_seconds
        super().on_response_complete()
