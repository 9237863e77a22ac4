"""Handlers of the trainer's messages."""

from __future__ import annotations

from typing import Any

from rljob.coordinator.connection import Connection
from rljob.coordinator.metrics import REFUSED
from rljob.coordinator.run import Run
from rljob.protocol import trainer_protocol as m


class TrainerMessages:
    """Messages of the trainer. Messages of a superseded incarnation are rejected."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def receive(self, connection: Connection, message: Any) -> None:
        """Handle one message of the union FromTrainer."""
        if isinstance(message, m.RegisterTrainer):
            self._register(connection, message)
        elif self._run.trainer.accepts(connection, message.incarnation):
            self._handle(message)
        else:
            REFUSED.labels(connection.role).inc()

    def _register(self, connection: Connection, message: m.RegisterTrainer) -> None:
        connection.instance = message.instance
        if self._run.over:
            connection.send(m.Stop("the run is over"))
            return
        self._run.trainer.register(connection, message)

    def _handle(self, message: Any) -> None:
        trainer, weights = self._run.trainer, self._run.weights
        match message:
            case m.StepDone():
                trainer.step_done(message)
            case m.CheckpointCopied():
                trainer.checkpoint_copied(message)
            case m.Checkpointed():
                trainer.checkpointed(message)
            case m.TrainerBlocked():
                trainer.blocked(message)
            case m.WeightGroupReady():
                weights.weights_ready(message)
            case m.WeightsSent():
                weights.weights_sent(message)
            case m.TrainerFailed():
                self._run.fail("TrainerFailed", message.reason)
            case _:
                raise AssertionError(f"no handler for {message}")

    def disconnected(self, connection: Connection) -> None:
        """Handle a lost connection: the trainer gets its next command when it registers again."""
        self._run.trainer.lose(connection)
