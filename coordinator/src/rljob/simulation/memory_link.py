"""Connections between simulated processes and the coordinator, in memory.

Messages are passed as objects, without encoding. The messages that one side sends in an iteration of the event loop
arrive together in the next one, as a frame does. Tests delay and change frames, cut connections, and let the
coordinator be away.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from rljob.coordinator.connection import Connection
from rljob.coordinator.message_router import MessageRouter

Deliver = Callable[[list[Any]], None]
Observer = Callable[[str, list[Any]], None]
"""Called with the name of a process and messages that it receives, or that the coordinator receives from it."""


Disturb = Callable[[list[Any]], tuple[float, list[Any]]]
"""Returns the seconds that a frame travels, and the messages that arrive."""
AFTER_THE_LAST = 1e-6
"""Seconds between two delayed frames of a direction: a connection keeps their order."""


@dataclass
class Traffic:
    """The messages of a simulation. ``observers`` see each frame when it arrives. ``disturb``: None: every frame
    arrives as it is, in the next iteration of the event loop."""

    messages: int = 0
    observers: list[Observer] = field(default_factory=list)
    disturb: Disturb | None = None

    def delivered(self, name: str, frame: list[Any]) -> None:
        """Count a frame."""
        self.messages += len(frame)
        for observer in self.observers:
            observer(name, frame)


@dataclass
class MemoryServer:
    """What processes connect to. ``router``: of the coordinator; None while it is away."""

    router: MessageRouter | None = None


class _Direction:
    """One direction of a connection."""

    def __init__(self, deliver: Deliver, traffic: Traffic) -> None:
        self._deliver = deliver
        self._traffic = traffic
        self._loop = asyncio.get_running_loop()
        self._outbox: list[Any] = []
        self._due = 0.0  # time of the event loop at which the last delayed frame arrives
        self._drops = 0

    def send(self, message: Any) -> None:
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(message)

    def drop(self) -> None:
        """Lose the messages that have not arrived."""
        self._outbox = []
        self._drops += 1

    def _flush(self) -> None:
        frame, self._outbox = self._outbox, []
        if not frame:
            return
        if self._traffic.disturb is None:
            self._deliver(frame)
            return
        seconds, frame = self._traffic.disturb(frame)
        self._due = max(self._due + AFTER_THE_LAST, self._loop.time() + seconds)
        self._loop.call_at(self._due, self._arrive, self._drops, frame)

    def _arrive(self, drops: int, frame: list[Any]) -> None:
        if drops == self._drops:
            self._deliver(frame)


class MemoryConnection(Connection):
    """The coordinator's side."""

    def __init__(self, role: str, link: MemoryLink) -> None:
        super().__init__(role)
        self._link = link
        self._outgoing = _Direction(self._arrived, link.traffic)

    def send(self, message: Any) -> None:
        """Send ``message`` unless the connection is closed."""
        if self.open:
            self._outgoing.send(message)

    def close(self) -> None:
        """Close the connection: the process connects again unless it was told to stop."""
        asyncio.get_running_loop().call_soon(self._link.cut)

    def drop(self) -> None:
        """Lose the messages that have not arrived."""
        self._outgoing.drop()

    def _arrived(self, frame: list[Any]) -> None:
        if self._link.connection is self:  # else the connection is half-open: nothing arrives by it
            self._link.arrived(frame)


class MemoryLink:
    """The process's side; a :class:`rljob.protocol.coordinator_link.MessageLink`.

    Args:
        server: the coordinator.
        role: agent, runner or trainer.
        name: of the process, for observers.
        register: returns the messages to send first on every connect.
        traffic: of the simulation.
        receive: called with the messages that arrive; None: :meth:`messages` yields them.
    """

    def __init__(
        self,
        server: MemoryServer,
        role: str,
        name: str,
        register: Callable[[], list[Any]],
        traffic: Traffic,
        receive: Deliver | None = None,
    ) -> None:
        self._server = server
        self._role = role
        self._name = name
        self._register = register
        self.traffic = traffic
        self._arrived: deque[Any] = deque()
        self._awaited: asyncio.Future[None] | None = None  # by :meth:`messages`
        self._receive = receive
        self._outgoing = _Direction(self._deliver, traffic)
        self._connection: MemoryConnection | None = None

    @property
    def connection(self) -> MemoryConnection | None:
        """The connection of the process; None if it has none."""
        return self._connection

    def connect(self) -> None:
        """Connect and register, unless connected or the coordinator is away."""
        if self._connection is None and self._server.router is not None:
            self._connection = MemoryConnection(self._role, self)
            for message in self._register():
                self._outgoing.send(message)

    def cut(self, noticed_after: float = 0.0) -> None:
        """Lose the connection and all messages that have not arrived. The coordinator notices it after a time, as with
        a half-open connection."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        self._outgoing.drop()
        connection.drop()
        router = self._server.router
        if router is not None and noticed_after:
            asyncio.get_running_loop().call_later(noticed_after, router.lost, connection)
        elif router is not None:
            router.lost(connection)

    def send(self, message: Any) -> None:
        """Send ``message``; without a connection it is dropped."""
        if self._connection is not None:
            self._outgoing.send(message)

    async def messages(self) -> AsyncIterator[Any]:
        """Connect, and yield incoming messages forever."""
        self.connect()
        while True:
            while self._arrived:
                yield self._arrived.popleft()
            self._awaited = asyncio.get_running_loop().create_future()
            await self._awaited

    def arrived(self, frame: list[Any]) -> None:
        """Take a frame of the coordinator."""
        self.traffic.delivered(self._name, frame)
        if self._receive is not None:
            self._receive(frame)
        else:
            self._arrived.extend(frame)
            if self._awaited is not None and not self._awaited.done():
                self._awaited.set_result(None)

    def _deliver(self, frame: list[Any]) -> None:
        if self._connection is not None and self._server.router is not None:
            self.traffic.delivered(self._name, frame)
            self._server.router.handle(self._connection, frame)
