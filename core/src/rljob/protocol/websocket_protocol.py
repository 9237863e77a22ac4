"""WebSockets of a server with the limits of :mod:`rljob.protocol.connection_limits`."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.http11 import Request

from rljob.protocol.connection_limits import OpenConnection
from rljob.protocol.request_limits import CONNECTION


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """A connection after the upgrade. It reads nothing before the application accepts it, so frames need a token."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._connection: OpenConnection = self.app_state[CONNECTION]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the time of the first message."""
        super().connection_made(transport)
        limits = self._connection.limits
        self._connection.set_deadline(limits.first_frame_seconds, "a WebSocket without a message")

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the connection."""
        super().connection_lost(exc)
        self._connection.closed()

    def handle_connect(self, event: Request) -> None:
        """Stop reading until the application accepts the connection: it then takes the first event of the queue."""
        super().handle_connect(event)
        if not self.read_paused and not self.transport.is_closing():
            self.read_paused = True
            self.transport.pause_reading()

    def handle_text(self, event: Frame) -> None:
        """Pass on a text frame as bytes, whether it is UTF-8 or not: the application refuses it."""
        self.handle_bytes(event)

    def send_receive_event_to_app(self) -> None:
        """Pass a message on; the first one ends the time limit."""
        self._connection.clear_deadline()
        super().send_receive_event_to_app()
