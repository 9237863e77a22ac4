"""The trainer of the rollout benchmark: it publishes its weights and hands out each batch without training."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import aiohttp
import msgspec
import zstandard
from torch import nn

from rljob.api.models import RLJob
from rljob.protocol import trainer_protocol as m
from rljob.protocol.batch_samples import SampleTokens
from rljob.protocol.shards import encode_selection
from rljob.protocol.shared_messages import Probe, Reject
from rljob.trainer.background_sender import BackgroundSender
from rljob.trainer.coordinator_client import CoordinatorClient
from rljob.trainer.weight_sender import WeightSender
from rljob.transfer.packed_weights import pack

POLL_SECONDS = 1.0
TRANSPORT = "gloo"


class IdleTrainer:
    """A trainer that yields every batch instead of training.

    Like the real trainer it serves its connection in a thread of its own, which answers pings and repeats results after
    a reconnect, so the caller may hold a batch for any time.

    Args:
        url: address of the coordinator.
        token: of the trainer.
        model: its parameters are the weights of every version.
        job: the resolved manifest.
    """

    def __init__(self, url: str, token: str, model: nn.Module, job: RLJob) -> None:
        sync = job.spec.weight_sync
        self._url, self._token = url, token
        self._weights = pack(model.named_parameters(), sync.bucket_bytes)
        sender = WeightSender("127.0.0.1", sync.timeout_seconds, TRANSPORT)
        self._publisher = BackgroundSender(sender, TRANSPORT, lambda result: self._coordinator.post(result))
        self._coordinator = CoordinatorClient(url, token, m.RegisterTrainer("idle", 0, 0), self._publisher.cancel)
        self._incarnation = 0

    async def batches(self) -> AsyncGenerator[tuple[int, list[SampleTokens]], None]:
        """Yield (step, samples) of each batch; the step is done when the caller requests the next batch.

        Raises:
            RuntimeError: the coordinator ended the run or rejected this trainer.
        """
        self._coordinator.start()
        next_step = 0
        while True:
            # With a time-out: an asyncio thread that waits without one would prevent the program from exiting.
            command = await asyncio.to_thread(self._coordinator.next, POLL_SECONDS)
            match command:
                case m.TrainerRegistered():
                    self._incarnation = command.incarnation
                    self._publisher.forget()
                case m.SendWeights():
                    self._publisher.publish(command, self._weights, Probe([], []))
                case m.Train() if command.step >= next_step:  # an earlier one was repeated after a reconnect
                    yield command.step, await self._pull(command)
                    next_step = command.step + 1
                    self._coordinator.post(m.StepDone(self._incarnation, command.step, {}))
                case m.Checkpoint():
                    self._coordinator.post(m.Checkpointed(self._incarnation, command.step, "checkpoints/none"))
                case m.Stop() | Reject():
                    raise RuntimeError(f"the coordinator ended the benchmark's trainer: {command.reason}")

    async def close(self) -> None:
        """Disconnect from the coordinator."""
        await asyncio.to_thread(self._coordinator.close)

    async def _pull(self, train: m.Train) -> list[SampleTokens]:
        url = f"{self._url}/v1/batches/{train.step}/shard?incarnation={self._incarnation}"
        headers = {"Authorization": f"Bearer {self._token}"}
        body = encode_selection(range(len(train.samples)), len(train.samples))
        async with aiohttp.ClientSession(headers=headers) as session, session.post(url, data=body) as response:
            response.raise_for_status()
            return msgspec.msgpack.decode(zstandard.decompress(await response.read()), type=list[SampleTokens])
