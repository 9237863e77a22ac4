"""A simulated trainer: one command at a time, a batch takes a given time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rljob.protocol import trainer_protocol as m
from rljob.protocol.known_tensors import tensors_digest
from rljob.protocol.shared_messages import ParameterMeta, Probe
from rljob.simulation.memory_link import MemoryLink, MemoryServer, Traffic
from rljob.simulation.simulated_engine import SimulationRecorder, weight_digest

NO_PROBE = Probe([], [])
TENSORS = [ParameterMeta("weight", "float32", [1])]
TENSORS_DIGEST = tensors_digest(TENSORS)


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
        self._saved = 0  # step of the newest checkpoint
        self._loaded = ""  # digest of the record of the checkpoint that this process loaded
        self._results: list[Any] = []  # the last StepDone, and the last Checkpointed
        self._life = 0  # number of the process: what an earlier one began has no effect

    def connect(self, server: MemoryServer, traffic: Traffic) -> MemoryLink:
        """Connect to the coordinator."""
        self._link = MemoryLink(server, "trainer", "trainer", self._register, traffic, self._receive)
        self._link.connect()
        return self._link

    def restart(self) -> None:
        """Replace the process by a new one with the newest checkpoint; :meth:`connect` is not called again."""
        self._life += 1
        self._link.cut()
        self._incarnation, self._step, self._results = 0, self._saved, []
        self._loaded = _record_digest(self._saved) if self._saved else ""

    def _register(self) -> list[Any]:
        name = f"trainer-{self._life}"
        return [m.RegisterTrainer(name, self._incarnation, self._step, self._loaded), *self._results]

    def _receive(self, frame: list[Any]) -> None:
        loop = asyncio.get_running_loop()
        for message in frame:
            match message:
                case m.TrainerRegistered():
                    self._incarnation = message.incarnation
                case m.Train() if message.step < self._step:
                    self._tell(m.StepDone(self._incarnation, message.step, {}))
                case m.Train():
                    loop.call_later(self._seconds(message), self._trained, message, loop.time(), self._life)
                case m.SendWeights():
                    self._send(message)
                case m.Checkpoint():
                    self._saved = message.step
                    self._link.send(m.CheckpointCopied(self._incarnation, message.step))
                    path, digest = f"checkpoints/{message.step}", _record_digest(message.step)
                    self._tell(m.Checkpointed(self._incarnation, message.step, path, digest))

    def _tell(self, result: m.StepDone | m.Checkpointed) -> None:
        """Send a result, which is repeated on every connect."""
        self._results = [each for each in self._results if type(each) is not type(result)] + [result]
        self._link.send(result)

    def _trained(self, batch: m.Train, start: float, life: int) -> None:
        if life != self._life or batch.step != self._step:
            return
        self._step = batch.step + 1
        self._recorder.trained(batch, start, asyncio.get_running_loop().time())
        self._tell(m.StepDone(self._incarnation, batch.step, {}))

    def _send(self, message: m.SendWeights) -> None:
        loop = asyncio.get_running_loop()
        for target in message.engines:
            parameters = [] if message.tensors == TENSORS_DIGEST else TENSORS
            self._link.send(
                m.WeightGroupReady(
                    self._incarnation, message.update, target.engine, "group", "", 0, 2, "gloo", parameters, NO_PROBE,
                    TENSORS_DIGEST,
                )
            )  # fmt: skip
            arguments = (self._incarnation, message.update, target.engine, self._step)
            loop.call_later(self._sync_seconds, self._sent, *arguments)
        if not message.engines:
            self._sent(self._incarnation, message.update, "", self._step)

    def _sent(self, incarnation: int, update: int, engine: str, version: int) -> None:
        digest = weight_digest(version)
        self._link.send(m.WeightsSent(incarnation, update, engine, digest, self._sync_seconds, ""))


def _record_digest(step: int) -> str:
    """Return the digest of the record of a checkpoint."""
    return f"record-{step}"
