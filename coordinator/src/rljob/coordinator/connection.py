"""The coordinator's side of the connection to an agent, a runner or the trainer."""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from typing import Any, Protocol

import msgspec

from rljob.protocol.agent_protocol import AckCompletions, RequestId
from rljob.protocol.frames import encode, encode_frame, frame_length
from rljob.protocol.runner_protocol import AckTrajectories
from rljob.protocol.shared_messages import Reject

log = logging.getLogger(__name__)


class Socket(Protocol):
    """The WebSocket methods that a connection uses."""

    async def send_bytes(self, data: bytes) -> None:
        """Send one binary message."""

    async def close(self, code: int = 1000, reason: str | None = None) -> None:
        """Close the connection."""


class Connection(ABC):
    """One connection, over any transport."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.instance = ""
        self.open = True
        self.heard = math.inf
        """Time (of the event loop) of the peer's last message; infinite before its first one."""

    @abstractmethod
    def send(self, message: Any) -> None:
        """Queue ``message``. It is dropped if the connection is closed: the peer registers again and receives the
        current state."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection after all queued messages are sent."""

    def acknowledge_completions(self, request_ids: list[RequestId]) -> None:
        """Acknowledge durable completions to an agent."""
        self.send(AckCompletions(request_ids))

    def acknowledge_trajectories(self, samples: list[str]) -> None:
        """Acknowledge durable scores and failures to a runner."""
        self.send(AckTrajectories(samples))

    def reject(self, reason: str, fatal: bool) -> None:
        """Reject a message; a fatal rejection closes the connection."""
        log.warning("rejected a message of %s %s: %s", self.role, self.instance, reason)
        self.send(Reject(reason, fatal))
        if fatal:
            self.close()


class SocketConnection(Connection):
    """A connection over a WebSocket. Messages queued in one iteration of the event loop share a frame."""

    def __init__(self, role: str, socket: Socket) -> None:
        super().__init__(role)
        self._socket = socket
        self._outbox: list[msgspec.Raw] = []
        self._wake = asyncio.Event()
        self._closing = False

    def send(self, message: Any) -> None:
        """Queue ``message``, encoded, unless the connection is closed."""
        if self.open:
            if not self._outbox:
                self._wake.set()
            self._outbox.append(encode(message))

    def close(self) -> None:
        """Close the connection after all queued messages are sent."""
        self._closing = True
        self._wake.set()

    async def send_loop(self) -> None:
        """Send queued messages until the connection is closed."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._outbox:
                count = frame_length(self._outbox)
                frame, self._outbox = self._outbox[:count], self._outbox[count:]
                await self._socket.send_bytes(encode_frame(frame))
            if self._closing:
                await self._socket.close()
                return
