"""The HTTP server of every process that listens: uvicorn with limits for peers without a token.

uvicorn bounds the headers (with h11) and the time between two requests. This module adds the time for a request and
the size of its body, and the number of connections (:mod:`rljob.protocol.connection_limits`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rljob.protocol.connection_limits import HttpLimits, OpenConnection, OpenConnections
from rljob.protocol.request_limits import CONNECTION, RequestLimits

if TYPE_CHECKING:
    import socket

    from uvicorn._types import ASGI3Application
    from uvicorn.server import ServerState

INVALID_REQUEST = "invalid HTTP request"


def no_token(authorization: str) -> bool:
    """Return False: the check of a server that gives no token to any process."""
    return False


def token_check(tokens: Iterable[str]) -> Callable[[str], bool]:
    """Return the check of a server whose requests have one of these bearer tokens."""
    expected = [f"Bearer {token}".encode() for token in tokens]
    return lambda authorization: any([hmac.compare_digest(authorization.encode(), each) for each in expected])


class ServerConfig(uvicorn.Config):
    """uvicorn's configuration and the limits of the server."""

    def __init__(self, app: ASGI3Application, limits: HttpLimits, **options: Any) -> None:
        self.open_connections = OpenConnections(limits)
        super().__init__(
            app,
            h11_max_incomplete_event_size=limits.head_bytes,
            timeout_keep_alive=limits.idle_seconds,
            access_log=False,
            **{"http": HttpProtocol, **options},
        )


class HttpServer(uvicorn.Server):
    """A server with limits.

    Args:
        app: ASGI application.
        limits: of this server.
        is_token: whether this value of the header Authorization is of a process of the job.
        signals: end at SIGTERM and SIGINT. Otherwise the caller sets ``should_exit``.
        options: of uvicorn.Config. ``http``: instead of :class:`HttpProtocol`, for TLS; see
            :mod:`rljob.protocol.tls_connection`.
    """

    def __init__(
        self,
        app: Any,
        limits: HttpLimits | None = None,
        is_token: Callable[[str], bool] = no_token,
        *,
        signals: bool = True,
        **options: Any,
    ) -> None:
        limits = limits or HttpLimits()
        options = {"ws": "none", "timeout_graceful_shutdown": 2} | options
        config = ServerConfig(RequestLimits(app, limits, is_token), limits, **options)
        super().__init__(config)
        self.open_connections = config.open_connections
        self.listening = asyncio.Event()
        self._signals = signals
        ignore_warnings_about_peers()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, and set ``listening``."""
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals only if this server is to."""
        with super().capture_signals() if self._signals else contextlib.nullcontext():
            yield


def ignore_warnings_about_peers() -> None:
    """Drop uvicorn's warnings: a line for every invalid request of any peer. They are counted instead."""
    logging.getLogger("uvicorn.error").addFilter(_is_not_of_a_peer)  # the same filter is added only once


def _is_not_of_a_peer(record: logging.LogRecord) -> bool:
    """Return whether a log record of uvicorn is kept."""
    return record.levelno != logging.WARNING


class HttpProtocol(H11Protocol):
    """One connection. Each phase of a request has a deadline."""

    config: ServerConfig

    def __init__(
        self,
        config: ServerConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.connection = OpenConnection(self.open_connections_of(config))
        self._phase = "new"
        super().__init__(config, server_state, app_state | {CONNECTION: self.connection}, _loop)

    @classmethod
    def open_connections_of(cls, config: ServerConfig) -> OpenConnections:
        """Return the connections of the server with this configuration."""
        return config.open_connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the time of the first request."""
        super().connection_made(cast("asyncio.Transport", transport))
        self._enter("head")
        self.connection.opened(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the connection."""
        super().connection_lost(exc)
        self.connection.closed()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request."""
        super().data_received(data)
        self._enter("idle" if self.transport.is_closing() else self._received())

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Let the WebSocket's protocol set the next deadline."""
        self._phase = "websocket"
        super().handle_websocket_upgrade(event)

    def on_response_complete(self) -> None:
        """Wait for the rest of this request, or for the next one."""
        super().on_response_complete()
        received = self._received()
        self._enter("idle" if received == "head" else received)

    def pause_writing(self) -> None:
        """Start the time in which the peer must read a part of its answer."""
        super().pause_writing()
        if self._phase == "answer":
            self.connection.require_progress()

    def resume_writing(self) -> None:
        """The peer has read its answer so far."""
        super().resume_writing()
        if self._phase == "answer":
            self.connection.clear_deadline()

    def send_400_response(self, msg: str) -> None:
        """Count an invalid request. uvicorn answers it and closes the connection; the application must not answer."""
        self.connection.count(INVALID_REQUEST)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        super().send_400_response(msg)

    def _received(self) -> str:
        """Return what this connection waits for."""
        if self.conn.their_state is h11.IDLE:
            return "head"
        return "body" if self.conn.their_state is h11.SEND_BODY else "answer"

    def _enter(self, phase: str) -> None:
        """Set the deadline of a phase. More bytes of the same phase do not extend it."""
        if phase == self._phase or self._phase == "websocket":
            return
        self._phase = phase
        self.connection.answering = phase == "answer"
        limits = self.connection.limits
        match phase:
            case "head":
                self.connection.set_deadline(limits.head_seconds, "incomplete headers")
            case "body":
                self.connection.set_deadline(limits.body_seconds, "incomplete body")
            case "answer":
                self.connection.clear_deadline()
            case "idle":  # uvicorn closes the connection, but first sends what the peer has not read
                self.connection.clear_deadline()
                self.connection.require_progress()
