"""A running engine and the sender of its weights, for the checks of :mod:`rljob.rollout.conformance`."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer

from rljob.protocol.agent_protocol import PrepareWeights, SamplingParams
from rljob.protocol.shared_messages import Probe
from rljob.rollout.adapters.base import EngineClient, GenerationOutput, unpack_ints
from rljob.rollout.adapters.update_steps import PAUSE, RECEIVE, RESUME, SCORE, StepError, carry_out
from rljob.transfer.bucket_wires import Wait
from rljob.transfer.packed_weights import pack
from rljob.transfer.rendezvous import SENDER_RANK, Rendezvous, RendezvousListener
from rljob.transfer.rounds import send_round
from rljob.transfer.weight_group import WeightGroup

BUCKET_BYTES = 1  # one tensor per broadcast
HOST = "127.0.0.1"
PROMPT = [3, 1, 4, 1, 5]
UPDATE_SECONDS = 30.0
NOISE = 0.02


@dataclass
class EngineUnderTest:
    """A running engine, and the sender of its weights.

    Args:
        client: of its server.
        in_flight: modes of its adapter.
        tensors: name and tensor of all parameters, in wire order; copied.
        vocabulary: token ids below this number are valid.
        max_model_length: of its pool.
        long_tokens: new tokens that take about a second; with PROMPT they fit ``max_model_length``.
        tolerance: of log-probabilities, absolute.
        workers: of the engine.
        tokenizer: of the model, with text for each token; None: stop strings are not checked.
    """

    client: EngineClient
    in_flight: Collection[str]
    tensors: Sequence[tuple[str, torch.Tensor]]
    vocabulary: int
    max_model_length: int
    long_tokens: int
    tolerance: float = 1e-4
    workers: int = 1
    tokenizer: Tokenizer | None = None
    version: int = -1
    _requests: int = field(default=0, init=False)
    _joined: tuple[Rendezvous, WeightGroup] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Copy the tensors."""
        self.tensors = [(name, tensor.detach().clone()) for name, tensor in self.tensors]

    async def generate(
        self,
        max_tokens: int,
        prompt: Sequence[int] = PROMPT,
        stop: Sequence[int] = (),
        name: str = "",
        temperature: float = 1.0,
        stop_strings: Sequence[str] = (),
        min_tokens: int = 0,
        answered: int = 0,
    ) -> GenerationOutput:
        """Generate with a new seed, and check the form of the output."""
        name = name or self.new_name()
        ends = (list(stop_strings), min_tokens, answered)
        sampling = SamplingParams(temperature, max_tokens, list(stop), self._requests, *ends)
        output = await self.client.generate(name, array("i", prompt).tobytes(), sampling)
        count = len(output.token_ids) // 4
        assert len(output.logprobs) // 4 == count <= max_tokens, "one log-probability per token"
        assert all(0 <= token < self.vocabulary for token in unpack_ints(output.token_ids))
        assert output.finish in ("stop", "length", "abort")
        bounds = [0, *(span.end for span in output.spans)]
        assert [span.start for span in output.spans] == bounds[:-1], "spans without gaps"
        assert bounds[-1] == count, "spans of all tokens"
        return output

    def new_name(self) -> str:
        """Return a new name for a request."""
        self._requests += 1
        return f"conformance-{self._requests}"

    @property
    def mode(self) -> str:
        """Mode of the updates of which the mode does not matter. Requests stay in flight if the adapter has such a
        mode."""
        return next(mode for mode in ("keep", "keepStaleCache", "abort", "wait") if mode in self.in_flight)

    async def update(self, in_flight: str = "", fresh: bool = False, change: bool = True) -> None:
        """Send weights as the next version, as agent and trainer do.

        Args:
            in_flight: mode; empty: :attr:`mode`.
            fresh: join a new group.
            change: change the weights first.
        """
        self.version += 1
        if change:
            self.tensors = [(name, tensor + NOISE * torch.randn_like(tensor)) for name, tensor in self.tensors]
        deadline = time.monotonic() + UPDATE_SECONDS
        rendezvous, sender = await self.join(fresh)
        update = self.prepare(rendezvous, in_flight)
        update.probe.token_ids = [PROMPT]
        sending = asyncio.to_thread(send_round, sender, pack(self.tensors, BUCKET_BYTES), deadline)
        sent, done = await asyncio.gather(sending, carry_out(self.client, update, UPDATE_SECONDS))
        assert done.digest == sent, "the digest of the bytes that were sent"
        assert [len(scores) for scores in done.scores] == [len(PROMPT) - 1], "the probe is scored"
        assert list(done.seconds) == [PAUSE, RECEIVE, RESUME, SCORE]

    async def fail_update(self, corrupted: int) -> None:
        """Send the weights as the next version, with the tensor of this index corrupted on the way, and check that the
        engine reports it. The engine stays paused."""
        self.version += 1
        rendezvous, sender = await self.join(fresh=True)
        update = self.prepare(rendezvous)
        deadline = time.monotonic() + UPDATE_SECONDS
        corrupt, weights = _CorruptSender(sender, corrupted), pack(self.tensors, BUCKET_BYTES)
        sending = asyncio.to_thread(send_round, corrupt, weights, deadline)
        sent, received = await asyncio.gather(
            sending, carry_out(self.client, update, UPDATE_SECONDS), return_exceptions=True
        )
        assert isinstance(received, StepError) and received.step == RECEIVE, "it committed corrupted weights"
        assert isinstance(sent, ValueError), "the receiver reported the digest of other bytes than it received"

    async def join(self, fresh: bool) -> tuple[Rendezvous, WeightGroup]:
        """Return the rendezvous and the sender's end of the group; the engine joins a new one if ``fresh`` or first."""
        if self._joined is not None and not fresh:
            return self._joined
        self.close()
        listener = RendezvousListener(HOST, 1 + self.workers)
        joining = asyncio.to_thread(WeightGroup.host, listener, "gloo", UPDATE_SECONDS)
        sender, _ = await asyncio.gather(joining, self.client.join(self.prepare(listener.rendezvous), UPDATE_SECONDS))
        self._joined = listener.rendezvous, sender
        return self._joined

    def close(self) -> None:
        """Leave the weight group."""
        if self._joined is not None:
            self._joined[1].abandon()
        self._joined = None

    def prepare(self, rendezvous: Rendezvous, in_flight: str = "") -> PrepareWeights:
        """Return the message of an update to the current version. ``in_flight``: empty: :attr:`mode`."""
        return PrepareWeights(
            update=self.version,
            lineage=0,
            version=self.version,
            group=rendezvous.group,
            address=rendezvous.address,
            port=rendezvous.port,
            world_size=rendezvous.world_size,
            transport="gloo",
            bucket_bytes=BUCKET_BYTES,
            parameters=pack(self.tensors, BUCKET_BYTES).parameters,
            probe=Probe([], []),
            in_flight=in_flight or self.mode,
            timeout_seconds=UPDATE_SECONDS,
        )


class _CorruptSender:
    """A sender's end of a group. Negates the numbers of one broadcast."""

    def __init__(self, group: WeightGroup, corrupted: int) -> None:
        self.rank, self.size, self.device, self.wire = group.rank, group.size, group.device, group.wire
        self._group = group
        self._left = corrupted

    def broadcast(self, tensor: torch.Tensor, root: int, deadline: float) -> None:
        self.begin_broadcast(tensor, root, deadline)()

    def begin_broadcast(self, tensor: torch.Tensor, root: int, deadline: float) -> Wait:
        if root == SENDER_RANK and self._left == 0:
            tensor = tensor.clone()
            tensor[3::4] ^= 0x80  # the sign of a float32
        self._left -= 1
        return self._group.begin_broadcast(tensor, root, deadline)
