"""A fake trainer without tensors: implements the trainer's protocol; its weights are a digest of all applied batches.

Every batch is checked (a whole number of whole groups, no sample twice, none older than α), pulled from the
coordinator, mixed into the state, and written to a journal. A checkpoint holds the state and the samples of every batch
in its lineage, so a test can check which batches the final weights contain.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shutil
import uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
import zstandard

from e2e.fakes.engine import group_name
from e2e.fakes.tokens import FIRST_STATE, next_state
from rljob.api.models import RLJob
from rljob.protocol import trainer_protocol as m
from rljob.protocol.batch_samples import SampleTokens
from rljob.protocol.checkpoint_files import STATE_FILE
from rljob.protocol.checkpoint_record import TrainerState, encode_state, hash_file
from rljob.protocol.coordinator_link import CoordinatorLink
from rljob.protocol.environment import read_environment
from rljob.protocol.heartbeat import beating
from rljob.protocol.score_messages import add_up
from rljob.protocol.shards import encode_selection
from rljob.protocol.shared_messages import Probe

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.05
_decoder = msgspec.msgpack.Decoder(list[SampleTokens])


class BadBatchError(Exception):
    """A batch violates a guarantee of the coordinator; the run must fail."""


@dataclass
class Weights:
    """The fake weights: number of applied batches, their digest, and the samples of each batch."""

    step: int
    state: str
    batches: list[list[str]]


@dataclass(frozen=True)
class Applied:
    """An applied batch."""

    train: m.Train
    shard: bytes  # msgpack of list[SampleTokens]
    state: str  # of the weights after the batch


class FakeTrainer:
    """One trainer process.

    Args:
        url: address of the coordinator.
        token: the trainer's token.
        job: the resolved manifest.
        storage: the run directory; checkpoints go to checkpoints/step-00000N, the journal to fake-trainer.jsonl.
        seconds_per_step: duration of applying a batch.
        salt: mixed into the weights at every batch: a trainer with another salt gives other weights in a replay.
    """

    def __init__(
        self, url: str, token: str, job: RLJob, storage: Path, seconds_per_step: float = 0.0, salt: bytes = b""
    ) -> None:
        self.applied: list[Applied] = []
        self.has_applied = asyncio.Condition()
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"}
        self._training = job.spec.training
        self._storage = storage
        self._journal = storage / "fake-trainer.jsonl"
        self._seconds_per_step = seconds_per_step
        self._salt = salt
        self._instance = f"fake-trainer-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._incarnation = 0
        self._refused: list[m.RefusedCheckpoint] = []
        self._last: m.StepDone | None = None  # sent again after every reconnect
        self._weights = self._newest_checkpoint()
        self._link = CoordinatorLink(url, "trainer", token, m.ToTrainer, self._register)

    async def run(self) -> None:
        """Execute commands until Stop.

        Raises:
            RefusedError: the coordinator rejects this trainer permanently.
            BadBatchError: a batch violates a guarantee of the coordinator.
        """
        async with aiohttp.ClientSession(headers=self._headers) as session:
            async for message in self._link.messages():
                match message:
                    case m.TrainerRegistered(incarnation=incarnation, unseen=unseen):
                        self._incarnation = incarnation
                        if unseen:
                            self._refuse(unseen)
                    case m.Train():
                        await self._train(message, session)
                    case m.SendWeights():
                        self._send_weights(message)
                    case m.Checkpoint():
                        self._checkpoint(message)
                    case m.Stop(reason=reason):
                        log.info("the coordinator stops this trainer: %s", reason)
                        return

    def _register(self) -> list[object]:
        registration = m.RegisterTrainer(self._instance, self._incarnation, self._weights.step, refused=self._refused)
        return [registration, *([self._last] if self._last is not None and self._incarnation else [])]

    def _refuse(self, unseen: list[int]) -> None:
        """Register again without these checkpoints; tests start the next trainer only after the previous one ended."""
        assert not {step for step in unseen if (self._checkpoint_directory(step) / STATE_FILE).exists()}
        self._refused = [m.RefusedCheckpoint(step, "it is missing") for step in unseen]
        self._link.send(self._register()[0])

    # --- batches ---

    async def _train(self, train: m.Train, session: aiohttp.ClientSession) -> None:
        if train.step < self._weights.step:  # sent again, because the connection was lost while it was applied
            last = self._last
            repeated = last if last and last.step == train.step else m.StepDone(self._incarnation, train.step, {})
            self._link.send(repeated)
            return
        log.info("applying batch %d.", train.step)
        try:
            if train.step > self._weights.step:
                raise BadBatchError(f"batch {train.step} for weights of version {self._weights.step}")
            shard = await self._pull(train, session)
            self._check(train, _decoder.decode(shard))
        except BadBatchError as error:
            self._link.send(m.TrainerFailed(self._incarnation, str(error)))
            raise
        if self._seconds_per_step:
            await asyncio.sleep(self._seconds_per_step)
        names = [sample.sample for sample in train.samples]
        state = next_state(self._weights.state, shard + self._salt)
        self._write_journal({"incarnation": self._incarnation, "step": train.step, "samples": names, "state": state})
        self._weights = Weights(train.step + 1, state, [*self._weights.batches, names])
        log.info("applied batch %d.", train.step)
        self.applied.append(Applied(train, shard, state))
        self._last = m.StepDone(self._incarnation, train.step, {"loss": 0.0, "grad_norm": 1.0, "kl_k3": 0.0})
        self._link.send(self._last)
        async with self.has_applied:
            self.has_applied.notify_all()

    async def _pull(self, train: m.Train, session: aiohttp.ClientSession) -> bytes:
        url = f"{self._url}/v1/batches/{train.step}/shard?incarnation={train.incarnation}"
        selection = encode_selection(range(len(train.samples)), len(train.samples))
        while True:
            try:
                async with session.post(url, data=selection) as response:
                    body = await response.read()
                    if response.status == 200:
                        return zstandard.ZstdDecompressor().decompress(body)
                    if response.status < 500:
                        raise BadBatchError(f"batch {train.step} is rejected: HTTP {response.status}: {body[:200]!r}")
            except (aiohttp.ClientError, OSError) as error:
                log.info("the coordinator cannot be reached: %s", error)
            await asyncio.sleep(RETRY_SECONDS)

    def _check(self, train: m.Train, tokens: list[SampleTokens]) -> None:
        names = [sample.sample for sample in train.samples]
        if [one.sample for one in tokens] != names:
            raise BadBatchError(f"the shard of batch {train.step} holds other samples than the batch")
        groups = Counter(sample.group for sample in train.samples)
        if len(groups) != self._training.prompts_per_step or set(groups.values()) != {
            self._training.samples_per_prompt
        }:
            raise BadBatchError(f"batch {train.step} has groups of sizes {sorted(groups.values())}")
        known = {name for batch in self._weights.batches for name in batch}
        if len(set(names)) != len(names) or known & set(names):
            raise BadBatchError(f"batch {train.step} has samples that were trained before: {known & set(names)}")
        for scalars, one in zip(train.samples, tokens, strict=True):
            oldest = min(span.version for span in one.spans)
            if train.step - oldest > self._training.max_staleness:
                raise BadBatchError(f"{one.sample} of batch {train.step} has tokens of version {oldest}")
            if scalars.min_version != oldest:
                raise BadBatchError(
                    f"{one.sample} has min_version {scalars.min_version}, but its oldest tokens are of version {oldest}"
                )
            written = sum(one.loss_mask)
            if written != scalars.response_tokens or sum(s.end - s.start for s in one.spans) != written:
                raise BadBatchError(f"{one.sample}: mask, spans and response length disagree")
            ends = [0, *(segment.end for segment in one.segments)]
            if [segment.start for segment in one.segments] != ends[:-1]:
                raise BadBatchError(f"{one.sample}: its segments are not contiguous")
            if {len(one.token_ids), len(one.logprobs), 4 * ends[-1]} != {4 * scalars.total_tokens}:
                raise BadBatchError(f"{one.sample}: tokens, segments and length disagree")
            if not add_up([segment.reward for segment in one.segments], scalars.reward):
                raise BadBatchError(f"{one.sample}: the rewards of its segments do not add up to its reward")

    def _write_journal(self, entry: dict[str, object]) -> None:
        with self._journal.open("a") as journal:
            journal.write(json.dumps(entry) + "\n")

    # --- weights and checkpoints ---

    def _send_weights(self, command: m.SendWeights) -> None:
        state = self._weights.state
        if not command.engines:
            self._link.send(m.WeightsSent(self._incarnation, command.update, "", state, 0.0, ""))
        for target in command.engines:
            self._link.send(
                m.WeightGroupReady(
                    incarnation=self._incarnation,
                    update=command.update,
                    engine=target.engine,
                    group=group_name(state),
                    address="127.0.0.1",
                    port=1,
                    world_size=1 + target.workers,
                    transport="gloo",
                    parameters=[],
                    probe=Probe([], []),
                )
            )
            self._link.send(m.WeightsSent(self._incarnation, command.update, target.engine, state, 0.0, ""))

    def _checkpoint(self, command: m.Checkpoint) -> None:
        directory = self._checkpoint_directory(command.step)
        directory.mkdir(parents=True, exist_ok=True)
        log.info("writing checkpoint %d.", command.step)
        temporary = directory / f"weights.{os.getpid()}"
        temporary.write_bytes(msgspec.json.encode(self._weights))
        temporary.replace(directory / "weights.json")
        for step in command.remove:
            shutil.rmtree(self._checkpoint_directory(step), ignore_errors=True)
        files = {path.name: hash_file(path) for path in directory.iterdir() if path.name != STATE_FILE}
        state = TrainerState(command.step, command.step, self._incarnation, {}, files)
        (directory / STATE_FILE).write_bytes(encode_state(state))
        path = str(directory.relative_to(self._storage))
        self._link.send(m.Checkpointed(self._incarnation, command.step, path, state.digest))

    def _checkpoint_directory(self, step: int) -> Path:
        return self._storage / "checkpoints" / f"step-{step:06d}"

    def _newest_checkpoint(self) -> Weights:
        found = [read_checkpoint(path) for path in self._storage.glob("checkpoints/step-*/weights.json")]
        return max(found, key=lambda weights: weights.step, default=Weights(0, FIRST_STATE, []))


def read_checkpoint(path: Path) -> Weights:
    """Return the content of a weights.json."""
    return msgspec.json.decode(path.read_bytes(), type=Weights)


def main() -> None:
    """Run the trainer as a process, with the environment of a component."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds-per-step", type=float, default=0.0)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    environment = read_environment()

    async def run() -> None:
        trainer = FakeTrainer(
            environment.coordinator, environment.token, environment.job, environment.storage, options.seconds_per_step
        )
        with beating():
            await trainer.run()

    asyncio.run(run())


if __name__ == "__main__":
    main()
