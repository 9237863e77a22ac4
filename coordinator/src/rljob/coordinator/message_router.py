"""Decodes the frames of agents, runners and the trainer, and passes each message to the handlers of its role.

Each role has one module of handlers: :mod:`rljob.coordinator.engine_messages` (agents),
:mod:`rljob.coordinator.runner_messages` and :mod:`rljob.coordinator.trainer_messages`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from rljob.coordinator.connection import Connection
from rljob.coordinator.engine_messages import EngineMessages
from rljob.coordinator.metrics import REFUSED
from rljob.coordinator.run import Run
from rljob.coordinator.runner_messages import RunnerMessages
from rljob.coordinator.trainer_messages import TrainerMessages
from rljob.protocol.agent_protocol import FromAgent
from rljob.protocol.frames import DECODE_ERRORS, frame_decoder
from rljob.protocol.runner_protocol import FromRunner
from rljob.protocol.trainer_protocol import FromTrainer

RECONNECT_SECONDS = 2.0
"""Time for a disconnected peer to reconnect before its work goes to other peers."""

INCOMING: dict[str, Any] = {"agent": FromAgent, "runner": FromRunner, "trainer": FromTrainer}
DECODERS = {role: frame_decoder(union) for role, union in INCOMING.items()}


class Handlers(Protocol):
    """The handlers of one role."""

    def receive(self, connection: Connection, message: Any) -> None:
        """Handle one message."""

    def disconnected(self, connection: Connection) -> Callable[[], None] | None:
        """Handle the loss of a connection; return a function to call if the peer does not reconnect in time."""


class MessageRouter:
    """Routes the messages of all connections of one run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._guard = run.fail_run_on_error()
        self.engines = EngineMessages(run)
        self._handlers: dict[str, Handlers] = {
            "agent": self.engines,
            "runner": RunnerMessages(run),
            "trainer": TrainerMessages(run),
        }

    def receive(self, connection: Connection, frame: bytes) -> None:
        """Handle one frame. A frame that cannot be decoded is rejected, and the connection is closed."""
        try:
            batch = DECODERS[connection.role].decode(frame)
        except DECODE_ERRORS as error:
            REFUSED.labels(connection.role).inc()
            connection.reject(f"the frame does not follow the protocol of this version: {error}", fatal=True)
            return
        self.handle(connection, batch)

    def handle(self, connection: Connection, batch: list[Any]) -> None:
        """Handle the messages of a frame."""
        connection.heard = self._run.now
        receive = self._handlers[connection.role].receive
        with self._guard:
            for message in batch:
                receive(connection, message)

    def lost(self, connection: Connection) -> None:
        """Handle the loss of a connection. Engines and runners get RECONNECT_SECONDS to reconnect."""
        connection.open = False
        with self._guard:
            give_up = self._handlers[connection.role].disconnected(connection)
            if give_up is not None:
                asyncio.get_running_loop().call_later(RECONNECT_SECONDS, self._give_up, give_up)

    def _give_up(self, give_up: Callable[[], None]) -> None:
        with self._guard:
            give_up()
