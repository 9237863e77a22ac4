"""A simulated trainer: one command at a time, a batch takes a given time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rljob.coordinator.message_router import MessageRouter
from rljob.protocol import messages as m
from rljob.simulation.memory_link import MemoryLink, Traffic
from rljob.simulation.simulated_engine import SimulationRecorder, weight_digest

NO_PROBE = m.Probe([], [])


class SimulatedTrainer:
    """The trainer.

    Args:
        seconds: returns the duration of a step.
        sync_seconds: duration of sending weights to an engine; the trainer works meanwhile.
        recorder: receives each step.
    """

    def __init__(self, seconds: Callable[[m.Train], float], sync_seconds: float, recorder: SimulationRecorder) -> None:
        self._seconds = seconds
        self._sync_seconds = sync_seconds
        self._recorder = recorder
        self._incarnation = 0
        self._step = 0

    def connect(self, router: MessageRouter, traffic: Traffic) -> MemoryLink:
        """Connect to the coordinator."""
        self._link = MemoryLink(router, "trainer", "trainer", self._register, traffic, self._receive)
        self._link.connect()
        return self._link

    def _register(self) -> list[Any]:
        return [m.RegisterTrainer("trainer", self._incarnation, self._step)]

    def _receive(self, frame: list[Any]) -> None:
        loop = asyncio.get_running_loop()
        for message in frame:
            match message:
                case m.TrainerRegistered():
                    self._incarnation = message.incarnation
                case m.Train():
                    loop.call_later(self._seconds(message), self._trained, message, loop.time())
                case m.SendWeights():
                    self._send(message)
                case m.Checkpoint():
                    self._link.send(m.CheckpointCopied(self._incarnation, message.step))
                    self._link.send(m.Checkpointed(self._incarnation, message.step, f"checkpoints/{message.step}"))

    def _trained(self, batch: m.Train, start: float) -> None:
        self._step = batch.step + 1
        self._recorder.trained(batch, start, asyncio.get_running_loop().time())
        self._link.send(m.StepDone(self._incarnation, batch.step, {}))

    def _send(self, message: m.SendWeights) -> None:
        loop = asyncio.get_running_loop()
        for target in message.engines:
            self._link.send(
                m.WeightGroupReady(
                    self._incarnation, message.update, target.engine, "group", "", 0, 2, "gloo", [], NO_PROBE
                )
            )
            loop.call_later(self._sync_seconds, self._sent, message.update, target.engine, self._step)
        if not message.engines:
            self._sent(message.update, "", self._step)

    def _sent(self, update: int, engine: str, version: int) -> None:
        digest = weight_digest(version)
        self._link.send(m.WeightsSent(self._incarnation, update, engine, digest, self._sync_seconds, ""))
