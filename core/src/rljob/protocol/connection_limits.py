"""Limits of an HTTP server for peers without a token: connections, times, sizes and descriptors.

Every connection starts without a token and keeps these limits until a request with a valid token arrives on it. If
there are too many such connections, or the process runs out of descriptors, the one that has waited longest is closed.
A process of the job sends its request at once, so a flood of other connections does not keep it from connecting.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

TOO_MANY = "too many connections without a token"
NO_DESCRIPTORS = "nearly all descriptors of this process are in use"
NOT_READ = "the peer reads nothing of its answer"


@dataclass(frozen=True)
class HttpLimits:
    """Limits of one server. Processes use these values, except for the size of bodies; tests use other times."""

    head_bytes: int = 64 << 10
    """Request line and headers of one request."""
    body_bytes: int = 64 << 10
    """Body of one request, with or without a token."""
    all_bodies_bytes: int = 256 << 20
    """Bodies of all requests that are received or answered at the same time. With more, incomplete ones of peers
    without a token are dropped."""
    connections: int = 256
    """Open connections without a token."""
    free_descriptors: int = 16
    """Descriptors that connections leave free for files, and for new connections until others are closed."""
    head_seconds: float = 10.0
    """From the start of a connection, or the first byte of a later request, to the end of the headers."""
    body_seconds: float = 30.0
    """From the end of the headers to the end of the body."""
    drain_seconds: float = 2.0
    """Longest time in which the rest of a body that the application does not read is received and dropped."""
    first_frame_seconds: float = 20.0
    """From the upgrade to a WebSocket to the end of its first message."""
    idle_seconds: int = 5
    """Between two requests of one connection."""
    stalled_seconds: float = 60.0
    """Longest time without progress of an answer, to a peer without a token."""


class OpenConnection:
    """One connection of a server: HTTP, and the WebSocket after an upgrade."""

    def __init__(self, connections: OpenConnections) -> None:
        self.limits = connections.limits
        self.has_token = False
        self.answering = False
        """A complete request was received; its answer is not complete."""
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def unread(self) -> bool:
        """Whether the peer has not read all that was sent to it."""
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    def opened(self, transport: asyncio.Transport) -> None:
        """Count the connection; close another one, or this one, if there are too many."""
        self._transport = transport
        self._connections.add(self, transport.get_extra_info("socket").fileno())

    def closed(self) -> None:
        """Release the connection."""
        self.clear_deadline()
        self._connections.remove(self)

    def accept_token(self) -> None:
        """A request with a valid token has arrived: do not count this connection any more."""
        self.has_token = True
        self._connections.remove(self)

    def set_deadline(self, seconds: float, problem: str) -> None:
        """Close the connection after ``seconds`` because of ``problem``, unless the deadline is cleared or replaced."""
        self._set_timer(seconds, self.close, f"{problem} after {seconds:g} s")

    def clear_deadline(self) -> None:
        """Remove the deadline."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def require_progress(self) -> None:
        """Close the connection when its peer reads nothing for ``stalled_seconds``, until the deadline is cleared."""
        if self._transport is not None and not self.has_token:
            self._set_timer(self.limits.stalled_seconds, self._check_progress, self._transport.get_write_buffer_size())

    def close(self, problem: str) -> None:
        """Close the connection at once, without an answer."""
        self.clear_deadline()
        self._connections.close(self, problem)
        if self._transport is not None:
            self._transport.abort()

    def count(self, problem: str) -> None:
        """Count a refused connection or request."""
        self._connections.count(problem)

    def _set_timer(self, seconds: float, action: Callable[..., None], argument: Any) -> None:
        self.clear_deadline()
        self._timer = asyncio.get_running_loop().call_later(seconds, action, argument)

    def _check_progress(self, unread: int) -> None:
        assert self._transport is not None, "an open connection has a transport"
        if unread and self._transport.get_write_buffer_size() >= unread:
            self.close(NOT_READ)
        else:
            self.require_progress()


class OpenConnections:
    """The connections of one server that have no token, oldest first, and the number of refusals by problem."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.refused: Counter[str] = Counter()
        self._without_token: dict[OpenConnection, None] = {}
        self._closing: set[OpenConnection] = set()
        """Closed, but their descriptors may still be in use."""

    def __len__(self) -> int:
        return len(self._without_token)

    def add(self, connection: OpenConnection, descriptor: int) -> None:
        """Add a new connection. The kernel gives it the lowest free ``descriptor``, so all below are in use."""
        self._without_token[connection] = None
        available = _descriptor_limit() - self.limits.free_descriptors
        while connection in self._without_token and descriptor - len(self._closing) >= available:
            self._dispensable(connection).close(NO_DESCRIPTORS)
        if len(self) > self.limits.connections:
            self._dispensable(connection).close(TOO_MANY)

    def remove(self, connection: OpenConnection) -> None:
        """Remove a connection that is closed or has a token."""
        self._without_token.pop(connection, None)
        self._closing.discard(connection)

    def close(self, connection: OpenConnection, problem: str) -> None:
        """Count a connection as closed because of ``problem``; :meth:`remove` follows when its descriptor is free."""
        self.count(problem)
        self._without_token.pop(connection, None)
        self._closing.add(connection)

    def count(self, problem: str) -> None:
        """Count a refused connection or request. Only the first of its kind is logged: a flood fills no disk."""
        self.refused[problem] += 1
        if self.refused[problem] == 1:
            log.warning("refused a connection: %s; further ones are counted, not logged", problem)

    def _dispensable(self, newest: OpenConnection) -> OpenConnection:
        """Return the connection to close: the oldest one that waits for a request, else the oldest one whose peer does
        not read its answer, else ``newest``."""
        others = [each for each in self._without_token if each is not newest]
        waiting = next((each for each in others if not each.answering), None)
        return waiting or next((each for each in others if each.unread), newest)


def _descriptor_limit() -> float:
    """Return the limit of this process, which may change while it runs."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return float("inf") if limit == resource.RLIM_INFINITY else limit
