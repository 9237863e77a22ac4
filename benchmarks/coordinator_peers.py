"""The peers of a coordinator under load, in a process of their own: agents, runner and trainer, which compute nothing.

They speak the coordinator's protocol over its WebSockets, so they also drive benchmarks/floor_coordinator.py. Every
completion has ``tokens`` tokens; every trajectory has ``turns`` turns, each with the context of the turns before it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import struct
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass

import aiohttp
import uvloop
import zstandard

from benchmarks.process_counters import cpu_seconds
from rljob.protocol.agent_protocol import (
    Completion,
    Completions,
    Forget,
    Generate,
    PrefixMissing,
    PrepareWeights,
    RegisterEngine,
    ToAgent,
    WeightAck,
)
from rljob.protocol.contexts import GrowingDigest, KeptContexts
from rljob.protocol.coordinator_link import CoordinatorLink
from rljob.protocol.runner_protocol import (
    AckTrajectories,
    Cancel,
    GenerateRequest,
    GenerateResult,
    LeaseTrajectory,
    RegisterRunner,
    ToRunner,
    TrajectoryScored,
)
from rljob.protocol.shards import encode_selection
from rljob.protocol.shared_messages import Message, Probe, VersionSpan
from rljob.protocol.trainer_protocol import (
    Checkpoint,
    Checkpointed,
    RegisterTrainer,
    SendWeights,
    StepDone,
    ToTrainer,
    Train,
    TrainerRegistered,
    WeightGroupReady,
    WeightsSent,
)

FRAME_COMPLETIONS = 16
FLUSH_SECONDS = 0.002
KEPT_BYTES = 256 << 20  # by each agent, as in rljob.rollout.requests
KEEP_ALIVE_SECONDS = 2.0
"""Shorter than the coordinator's: a request on a connection that it is just closing would fail."""
VARIANTS = 64
"""Different completions: a coordinator that compresses must not see the same bytes each time."""
TEXT = " ".join(f"word{i}" for i in range(400))[:2000]
PROMPT_TOKENS = 100
PROMPT = struct.pack(f"<{PROMPT_TOKENS}i", *range(PROMPT_TOKENS))


@dataclass(frozen=True)
class Load:
    """What the peers do.

    Args:
        prompts: groups in a batch.
        staleness: of the job; 0: no sample is generated while shards are pulled.
        agents: number of engines.
        ranks: data-parallel ranks that pull their shards of each batch; 0: nothing is pulled.
        samples: scored samples after which the peers stop.
        warm: scored samples before the measurement.
        tokens: length of a completion.
        turns: of a trajectory.
        observation: tokens between two turns.
        rate: completions per second over all agents; 0: at once.
        ask: measure meanwhile how long /healthz takes.
    """

    prompts: int = 64
    staleness: int = 1
    agents: int = 64
    ranks: int = 8
    samples: int = 8192
    warm: int = 1024
    tokens: int = 500
    turns: int = 1
    observation: int = 0
    rate: float = 0.0
    ask: bool = False


class Peers:
    """All peers of one coordinator. They print events as JSON lines, with the counters of the coordinator's process:
    begin, end, shards begin, shards end."""

    def __init__(self, url: str, token: str, load: Load, pid: int) -> None:
        draw = random.Random(1)
        self.url, self.token, self.load, self.pid = url, token, load, pid
        self.tokens = [struct.pack(f"<{load.tokens}i", *_ids(draw, load.tokens)) for _ in range(VARIANTS)]
        self.logprobs = [
            struct.pack(f"<{load.tokens}f", *(-draw.random() for _ in range(load.tokens))) for _ in range(VARIANTS)
        ]
        self.observation = struct.pack(f"<{load.observation}i", *_ids(draw, load.observation))
        self.due: deque[tuple[Agent, Generate]] = deque()
        self.scored = 0
        self.served: set[int] = set()  # agents with weights
        self.ready, self.ended = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        """Play all peers until ``samples`` samples are scored."""
        working = [Agent(self, number).run() for number in range(self.load.agents)]
        playing = [self._drive(), self._train(), *working, *([self._pace()] if self.load.rate else [])]
        tasks = [asyncio.create_task(each) for each in playing]
        ended = asyncio.create_task(self.ended.wait())
        done, _ = await asyncio.wait([*tasks, ended], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    def link(self, role: str, incoming: object, first: Message) -> CoordinatorLink:
        """Return a connection that registers with ``first``."""
        return CoordinatorLink(self.url, role, self.token, incoming, lambda: [first])

    def completion(self, request: Generate, version: int) -> Completion:
        """Return what an engine answers."""
        which = hash(request.request_id.sample) % VARIANTS
        spans = [VersionSpan(version, 0, self.load.tokens)]
        return Completion(
            request.request_id, self.tokens[which], self.logprobs[which], spans, "stop", 1.0, request.context
        )

    def has_weights(self, agent: int) -> None:
        """Note that an agent can generate; the runner connects when all can."""
        self.served.add(agent)
        if len(self.served) == self.load.agents:
            self.ready.set()

    def say(self, event: str, **values: object) -> None:
        """Print an event for the benchmark."""
        counters = {"cpu_seconds": cpu_seconds(self.pid)}
        sys.stdout.write(json.dumps({"event": event, **counters, **values}) + "\n")
        sys.stdout.flush()

    async def _pace(self) -> None:
        """Release completions at ``rate``, without catching up what the coordinator did not request in time."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            now = time.monotonic()
            count = int((now - last) * self.load.rate)
            last += count / self.load.rate
            for _ in range(min(count, len(self.due))):
                agent, request = self.due.popleft()
                agent.finish(request)

    async def _drive(self) -> None:
        await self.ready.wait()
        draw = random.Random(2)
        leases: dict[str, tuple[LeaseTrajectory, GrowingDigest]] = {}
        turn_tokens = self.load.tokens + self.load.observation
        link = self.link("runner", ToRunner, RegisterRunner("runner", 1 << 20, {}))

        def request(sample: str, turn: int, given: bytes) -> None:
            lease, before = leases[sample]
            prefix = (PROMPT_TOKENS + turn * turn_tokens - self.load.observation, before.digest()) if turn else (0, "")
            before.append(given)
            link.send(
                GenerateRequest(
                    sample, turn, given, self.load.tokens, 1.0, [0], lease.attempt, lease.lease, [], 0, *prefix
                )
            )

        async for message in link.messages():
            match message:
                case LeaseTrajectory():
                    leases[message.sample] = message, GrowingDigest()
                    request(message.sample, 0, PROMPT)
                case GenerateResult(sample=sample) if sample in leases:
                    lease, before = leases[sample]
                    before.append(message.token_ids)
                    if message.turn + 1 < self.load.turns:
                        request(sample, message.turn + 1, self.observation)
                    else:
                        reward, metrics = draw.random(), {"accuracy": 1.0}
                        link.send(
                            TrajectoryScored(
                                sample, reward, metrics, TEXT, self.load.turns, lease.attempt, [], lease.lease
                            )
                        )
                case AckTrajectories(samples=samples):
                    for sample in samples:
                        del leases[sample]
                        self._count()
                case Cancel(samples=samples):
                    for sample in samples:
                        leases.pop(sample, None)

    def _count(self) -> None:
        self.scored += 1
        if self.scored == self.load.warm:
            self.say("begin")
        if self.scored == self.load.samples:
            self.say("end")
            self.ended.set()

    async def _train(self) -> None:
        incarnation = version = 0
        link = self.link("trainer", ToTrainer, RegisterTrainer("trainer", 0, 0))
        headers = {"Authorization": f"Bearer {self.token}"}
        connector = aiohttp.TCPConnector(keepalive_timeout=KEEP_ALIVE_SECONDS)
        async with aiohttp.ClientSession(headers=headers, connector=connector) as session:
            async for message in link.messages():
                match message:
                    case TrainerRegistered():
                        incarnation = message.incarnation
                    case Train():
                        await self._pull(session, message)
                        version = message.step + 1
                        advantages = struct.pack(f"<{len(message.samples)}f", *([0.5] * len(message.samples)))
                        link.send(StepDone(incarnation, message.step, {"loss": 0.0}, advantages))
                    case SendWeights(update=update):
                        for reply in self._sent(message, incarnation, update, f"d{version}"):
                            link.send(reply)
                    case Checkpoint():
                        link.send(Checkpointed(incarnation, message.step, "checkpoints/none", "0" * 64))

    def _sent(self, command: SendWeights, incarnation: int, update: int, digest: str) -> list[Message]:
        if not command.engines:
            return [WeightsSent(incarnation, update, "", digest, 0.0, "")]
        found: list[Message] = []
        for target in command.engines:
            engine, world = target.engine, 1 + target.workers
            none = Probe([], [])
            found += [
                WeightGroupReady(incarnation, update, engine, digest, "127.0.0.1", 1, world, "gloo", [], none),
                WeightsSent(incarnation, update, engine, digest, 0.0, ""),
            ]
        return found

    async def _pull(self, session: aiohttp.ClientSession, train: Train) -> None:
        """Pull the batch by all ranks, a contiguous part each."""
        ranks, count = self.load.ranks, len(train.samples)
        if not ranks:
            return
        url = f"{self.url}/v1/batches/{train.step}/shard?incarnation={train.incarnation}"

        async def shard(rank: int) -> int:
            selection = encode_selection(range(count * rank // ranks, count * (rank + 1) // ranks), count)
            async with session.post(url, data=selection) as response:
                response.raise_for_status()
                return len(zstandard.ZstdDecompressor().decompress(await response.read()))

        self.say("shards begin")
        await asyncio.gather(*(shard(rank) for rank in range(ranks)))
        self.say("shards end", samples=count)


class Agent:
    """An agent whose engine answers at once, or when the pace allows it."""

    def __init__(self, peers: Peers, number: int) -> None:
        self._peers, self._number, self._version = peers, number, -1
        self._done: list[Completion] = []
        self._contexts = KeptContexts(KEPT_BYTES)
        first = RegisterEngine(f"engine-{number}", "main", 256, 1 << 16, -1, -1, [])
        self._link = peers.link("agent", ToAgent, first)

    async def run(self) -> None:
        """Answer requests and weight updates."""
        async for message in self._link.messages():
            match message:
                case Generate():
                    self._generate(message)
                case Forget():
                    self._contexts.forget(message.contexts)
                case PrepareWeights():
                    self._version = message.version
                    self._peers.has_weights(self._number)
                    seconds = (0.1, 0.1, 0.0)
                    self._link.send(
                        WeightAck(message.update, message.lineage, message.version, message.group, -1, -1, *seconds)
                    )

    def _generate(self, message: Generate) -> None:
        request = self._contexts.whole(message)
        if request is None:
            self._link.send(PrefixMissing(message.request_id))
        elif self._peers.load.rate:
            self._peers.due.append((self, request))
        else:
            self.finish(request)

    def finish(self, request: Generate) -> None:
        """Answer a request, together with others that end within two milliseconds."""
        completion = self._peers.completion(request, self._version)
        if self._peers.load.turns > 1:
            self._contexts.keep(request.request_id, request.token_ids + completion.token_ids)
        self._done.append(completion)
        if len(self._done) == 1:
            asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._flush)
        elif len(self._done) == FRAME_COMPLETIONS:
            self._flush()

    def _flush(self) -> None:
        if self._done:
            self._link.send(Completions(self._done))
            self._done = []


def _ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(150_000) for _ in range(count)]


def main() -> None:
    """Play the peers of the coordinator at an address."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("load", help="JSON of a Load")
    parser.add_argument("--token", default="none")
    parser.add_argument("--pid", type=int, required=True, help="process of the coordinator")
    options = parser.parse_args()
    uvloop.run(Peers(options.url, options.token, Load(**json.loads(options.load)), options.pid).run())


def encoded(load: Load) -> str:
    """Return the argument of a load."""
    return json.dumps(asdict(load))
