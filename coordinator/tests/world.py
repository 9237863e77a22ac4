"""The coordinator with simulated peers in one process: no sockets, driven message by message.

Tokens are a function of the version that the engine serves and the seed; weights are a hash of the trained batches.
Nothing waits for a clock: :meth:`World.settle` runs until all peers are idle.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import re
import sqlite3
import struct
from array import array
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from rljob.api.models import RLJob
from rljob.api.resolve import resolve
from rljob.coordinator import message_router
from rljob.coordinator import run as run_module
from rljob.coordinator.batches import BatchShards
from rljob.coordinator.connection import SocketConnection
from rljob.coordinator.message_router import MessageRouter
from rljob.coordinator.recovery import recover
from rljob.coordinator.run import Run
from rljob.ledger.store import TransitionError
from rljob.ledger.writer import LedgerWriter
from rljob.protocol.agent_protocol import (
    Abort,
    AckCompletions,
    Completion,
    Completions,
    Forget,
    Generate,
    PrefixMissing,
    PrepareWeights,
    RegisterEngine,
    RestartEngine,
    ToAgent,
    WeightAck,
)
from rljob.protocol.batch_samples import BatchSample, SampleTokens
from rljob.protocol.contexts import KeptContexts, context_digest
from rljob.protocol.frames import encode_frame, frame_decoder
from rljob.protocol.known_tensors import KnownTensors, tensors_digest
from rljob.protocol.runner_protocol import (
    AckGroups,
    AckTrajectories,
    Cancel,
    FilterGroup,
    GenerateRequest,
    GenerateResult,
    GroupFiltered,
    LeaseTrajectory,
    RegisterRunner,
    ToRunner,
    TrajectoryScored,
    TurnTokens,
)
from rljob.protocol.shards import encode_selection
from rljob.protocol.shared_messages import ParameterMeta, Probe, VersionSpan
from rljob.protocol.trainer_protocol import (
    Checkpoint,
    CheckpointCopied,
    Checkpointed,
    RefuseCheckpoint,
    RefusedCheckpoint,
    RegisterTrainer,
    SendWeights,
    StepDone,
    ToTrainer,
    Train,
    TrainerRegistered,
    WeightGroupReady,
    WeightsSent,
)
from rljob.scheduling.request import RequestKey

TENSORS = [ParameterMeta("weight", "float32", [2, 3])]
TENSORS_DIGEST = tensors_digest(TENSORS)


def job(steps: int = 4, alpha: int = 1, n: int = 2, g: int = 2, **spec: Any) -> RLJob:
    """Return a small job."""
    return resolve(manifest(steps, alpha, n, g, **spec))


def manifest(steps: int = 4, alpha: int = 1, n: int = 2, g: int = 2, **spec: Any) -> RLJob:
    """Return the manifest of a small job, as the user wrote it."""
    body = {
        "seed": 3,
        "models": [{"name": "policy", "source": "job://model"}],
        "training": {"steps": steps, "promptsPerStep": n, "samplesPerPrompt": g, "maxStaleness": alpha},
        "tasks": [
            {"name": "sums", "data": {"reasoningGym": {"dataset": "chain_sum"}}, "reward": "r",
             "sampling": {"maxTokens": 16}}
        ],
        "rewards": [{"name": "r", "builtin": "reasoning_gym"}],
        "rollouts": [{"name": "main", "maxConcurrency": 4}],
        "checkpoints": {"everySteps": 2, "keep": 2},
        **spec,
    }  # fmt: skip
    return RLJob.model_validate({"metadata": {"name": "test"}, "spec": body})


def random_job(rng: random.Random) -> RLJob:
    """Return a job of six steps with random settings of the scheduler."""
    return job(
        alpha=rng.choice([0, 1, 2]),
        steps=6,
        evaluation=rng.choice([None, {"problems": 3, "everySteps": 2}]),
        algorithm={"groupFilter": rng.choice(["none", "nonconstant"]), "preset": rng.choice(["grpo", "remax"])},
        scheduling={"redundancy": {"groups": rng.choice([0, 0, 1]), "members": rng.choice([0, 0, 1])}},
        weightSync={"inFlight": rng.choice(["keep", "abort"])},
    )


OUTGOING = {role: frame_decoder(u) for role, u in {"agent": ToAgent, "runner": ToRunner, "trainer": ToTrainer}.items()}


class InlineExecutor(Executor):
    """Runs each call at once in the calling thread, so that the order of events does not depend on a second thread.
    The caller learns of the result after ``late()`` turns of the event loop."""

    def __init__(self, late: Callable[[], int]) -> None:
        self._late = late

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            finish = partial(future.set_result, call(*args, **kwargs))
        except (OSError, sqlite3.Error, TransitionError) as error:
            finish = partial(future.set_exception, error)
        self._finish(future, finish, self._late())
        return future

    def _finish(self, future: Future[Any], finish: Callable[[], None], turns: int) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self._finish, future, finish, turns - 1)
        elif not future.cancelled():
            finish()


class FakePeer(SocketConnection):
    """A connection that keeps its messages in a list."""

    def __init__(self, role: str) -> None:
        super().__init__(role, socket=None)  # type: ignore[arg-type]
        self.instance = ""

    def take(self) -> list[Any]:
        """Return and remove the queued messages."""
        taken, self._outbox = self._outbox, []
        return OUTGOING[self.role].decode(encode_frame(taken))


def int32(values: list[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


class Component:
    """A simulated process that connects to the coordinator."""

    role = ""

    def __init__(self, world: World) -> None:
        self.world = world
        self.peer: FakePeer | None = None

    def connect(self) -> None:
        self.peer = FakePeer(self.role)
        self.say(self.hello())

    def hello(self) -> Any:
        raise AssertionError

    def say(self, *messages: Any) -> None:
        if self.peer is not None:
            self.world.router.receive(self.peer, encode_frame(list(messages)))

    def disconnect(self) -> None:
        if self.peer is not None:
            peer, self.peer = self.peer, None
            self.world.router.lost(peer)

    def step(self) -> bool:
        """Handle received messages; return whether there were any."""
        if self.peer is None:
            return False
        messages = self.peer.take()
        for message in messages:
            self.handle(message)
        return bool(messages)

    def handle(self, message: Any) -> None:
        raise AssertionError


def turns_of(sample: str) -> int:
    """Return the number of turns of a sample: of four members, or four groups, one has two turns and one has three."""
    return (1, 2, 1, 3)[sum(map(int, re.findall(r"\d+", sample))) % 4]


def observation(turn: int) -> bytes:
    """Return the tokens between turn ``turn`` and the next; none after the second."""
    return int32([7, 8, 9][turn:]) if turn < 1 else b""


def generate_request(
    lease: LeaseTrajectory, turn: int, before: bytes, given: bytes, stop: list[str] | None = None, min_tokens: int = 0
) -> GenerateRequest:
    """Return a request for turn ``turn``, whose context is ``before`` and ``given`` (int32)."""
    prefix = (len(before) // 4, context_digest(before)) if before else (0, "")
    request = (lease.sample, turn, given, 16, 1.0, [0], lease.attempt, lease.lease, stop or [], min_tokens)
    return GenerateRequest(*request, *prefix)


class Runner(Component):
    role = "runner"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.driving: dict[str, LeaseTrajectory] = {}
        self.turns: dict[str, list[TurnTokens]] = {}
        self.finished: dict[str, TrajectoryScored] = {}
        self.held_out: dict[str, int] = {}
        self.prompt = lambda lease: [lease.row, 1, 2]  # token ids
        self.turns_of = turns_of
        self.credits_of = lambda sample: [0.25 * (turn + 1) for turn in range(self.turns_of(sample) - 1)]
        self.lives = 0
        self.stop: list[str] = []
        self.min_tokens = 0
        self.filtered: dict[str, GroupFiltered] = {}
        self.asked: list[FilterGroup] = []

    def reborn(self) -> None:
        """Restart the process: it loses its state."""
        self.driving, self.turns, self.finished, self.filtered = {}, {}, {}, {}
        self.lives += 1

    def hello(self) -> Any:
        driving = {name: lease.lease for name, lease in self.driving.items()}
        return RegisterRunner(f"runner.{self.lives}", 1000, driving, self.held_out)

    def connect(self) -> None:
        super().connect()
        for sample in list(self.driving):
            if sample in self.finished:
                self.say(self.finished[sample])
            else:
                self._continue(sample)
        self.say(*self.filtered.values())

    def _continue(self, sample: str) -> None:
        """Request the next turn, or score after the last one."""
        lease, turns = self.driving[sample], self.turns[sample]
        if len(turns) == self.turns_of(sample):
            self._score(sample, turns)
            return
        given, before = int32(self.prompt(lease)), b""
        for turn in turns:
            assert turn.given == given, f"{sample}: turn {turn.turn} was generated from another context"
            before, given = before + given + turn.token_ids, observation(turn.turn)
        self.say(generate_request(lease, len(turns), before, given, self.stop, self.min_tokens))

    def handle(self, message: Any) -> None:
        match message:
            case LeaseTrajectory(sample=sample, turns=turns):
                assert [turn.turn for turn in turns] == list(range(len(turns)))
                self.driving[sample], self.turns[sample] = message, list(turns)
                self._continue(sample)
            case GenerateResult(sample=sample, turn=turn):
                if sample in self.driving and turn == len(self.turns[sample]):
                    before = b"".join(t.given + t.token_ids for t in self.turns[sample])
                    given = observation(turn - 1) if turn else int32(self.prompt(self.driving[sample]))
                    assert message.context == context_digest(before + given)
                    self.turns[sample].append(TurnTokens(turn, given, message.token_ids, message.finish))
                    self._continue(sample)
            case Cancel(samples=samples):
                for sample in samples:
                    self.finished.pop(sample, None)
                    self.driving.pop(sample, None)
            case AckTrajectories(samples=samples):
                for sample in samples:
                    if self.finished.pop(sample, None) is not None:
                        self.driving.pop(sample, None)
            case FilterGroup():
                self.asked.append(message)
                decision = self.world.decide(message)
                if decision is not None:
                    self.filtered[message.group] = decision
                    self.say(decision)
            case AckGroups(numbers=numbers):
                self.filtered = {name: known for name, known in self.filtered.items() if known.number not in numbers}

    def _score(self, sample: str, turns: list[TurnTokens]) -> None:
        """Score the last response."""
        reward, credits = self.world.reward(sample, turns[-1]), self.credits_of(sample)
        self.finished[sample] = TrajectoryScored(
            sample,
            reward,
            {},
            "text",
            len(turns),
            self.driving[sample].attempt,
            credits if math.isfinite(reward) else [],
            self.driving[sample].lease,
        )
        self.say(self.finished[sample])


def accept(message: FilterGroup) -> GroupFiltered:
    """Accept a group."""
    return GroupFiltered(message.group, message.number, True)


class Agent(Component):
    role = "agent"

    def __init__(self, world: World, name: str = "engine-0", pool: str = "main") -> None:
        super().__init__(world)
        self.name, self.pool, self.lives = name, pool, 0
        self.settings = next(entry for entry in world.manifest.spec.rollouts if entry.name == pool)
        self.generated: list[tuple[str, int, int]] = []  # sample, prompt and maximum response tokens, version
        self.queue: list[Generate] = []
        self.unacknowledged: dict[RequestKey, Completion] = {}
        self.lineage, self.version, self.digest = -1, -1, ""
        self.preparing: PrepareWeights | None = None
        self.begun: dict[RequestKey, int] = {}  # request → version at its start
        self.hold = False  # generate nothing
        self.wrong_digest = ""  # digest to report instead
        self.probe = (0.0, 0.0)  # largest and mean difference to report
        self.contexts = KeptContexts(1 << 20)
        self.missing = 0  # requests whose prefix was missing
        self.tensors = KnownTensors()
        self.lists = 0  # tensors whose names came with updates

    def reborn(self) -> None:
        """Restart the engine server: it loses its state."""
        self.lives += 1
        self.queue, self.unacknowledged, self.begun = [], {}, {}
        self.contexts.clear()
        self.lineage, self.version, self.digest, self.preparing = -1, -1, "", None

    @property
    def instance(self) -> str:
        return f"{self.name}.{self.lives}"

    def hello(self) -> Any:
        running = [generate.request_id for generate in self.queue]
        return RegisterEngine(
            self.instance, self.pool, self.settings.max_concurrency, self.settings.max_model_length,
            self.lineage, self.version, running, self.digest,
        )  # fmt: skip

    def connect(self) -> None:
        super().connect()
        if self.unacknowledged:
            self.say(Completions(list(self.unacknowledged.values())))

    def handle(self, message: Any) -> None:
        match message:
            case Generate():
                if self.version >= 0:  # else it was meant for the previous engine process
                    self._generate(message)
            case Forget(contexts=names):
                self.contexts.forget(names)
            case Abort(request_ids=request_ids):
                self.queue = [generate for generate in self.queue if generate.request_id not in request_ids]
            case AckCompletions(request_ids=request_ids):
                for request_id in request_ids:
                    self.unacknowledged.pop(msgspec.structs.astuple(request_id), None)
            case PrepareWeights():
                if message.engine == self.instance:
                    assert self.tensors.of(message.tensors, message.parameters) == (TENSORS if message.tensors else [])
                    self.lists += len(message.parameters)
                    self.preparing = message
            case RestartEngine():
                self.reborn()
                self.say(self.hello())

    def _generate(self, message: Generate) -> None:
        whole = self.contexts.whole(message)
        if whole is None:
            self.missing += 1
            self.say(PrefixMissing(message.request_id))
            return
        self.queue.append(whole)
        self.begun.setdefault(msgspec.structs.astuple(message.request_id), self.version)
        tokens = len(whole.token_ids) // 4 + message.sampling.max_tokens
        self.generated.append((message.request_id.sample, tokens, self.version))

    def step(self) -> bool:
        busy = super().step()
        prepared = self.preparing
        if prepared is not None and self.peer is not None and prepared.group in self.world.broadcasts:
            self.preparing = None
            self.digest = self.wrong_digest or self.world.broadcasts.pop(prepared.group)
            self.lineage, self.version = prepared.lineage, prepared.version
            seconds = (0.1, 0.0, 0.0)
            self.say(WeightAck(prepared.update, prepared.lineage, prepared.version, self.digest, *self.probe, *seconds))
            busy = True
        if self.queue and not self.hold and self.peer is not None:
            generate = self.queue.pop(0)
            begun = self.begun.pop(msgspec.structs.astuple(generate.request_id))
            completion = generate_tokens(generate, begun, self.version)
            self.unacknowledged[msgspec.structs.astuple(generate.request_id)] = completion
            self.contexts.keep(generate.request_id, generate.token_ids + completion.token_ids)
            self.say(Completions([completion]))
            busy = True
        return busy


def generate_tokens(generate: Generate, begun: int, version: int) -> Completion:
    """Generate tokens as a function of prompt, seed and version; the first token has the version ``begun``."""
    digest = hashlib.sha256(generate.token_ids + struct.pack("<qi", generate.sampling.seed, version)).digest()
    tokens = list(digest[: 1 + digest[0] % generate.sampling.max_tokens])
    logprobs = struct.pack(f"<{len(tokens)}f", *([-1.0] * len(tokens)))
    spans = [VersionSpan(begun, 0, 1), *([VersionSpan(version, 1, len(tokens))] if len(tokens) > 1 else [])]
    context = context_digest(generate.token_ids)
    return Completion(generate.request_id, int32(tokens), logprobs, spans, "stop", 0.01, context)


class Trainer(Component):
    role = "trainer"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.incarnation = 0
        self.step_, self.state = 0, "start"
        self.batches: list[tuple[int, bytes]] = []
        self.saved: dict[int, str] = {0: "start"}
        self.commands: list[Any] = []
        self.last: int | None = None  # last step that this process applied
        self.writing: tuple[int, str, list[int]] | None = None  # step and state of a checkpoint, steps to remove
        self.hold = False
        self.hold_writes = False
        self.drift = ""  # makes a replay differ
        self.refused: list[RefusedCheckpoint] = []  # by this process
        self.loaded = ""  # digest of the record of the checkpoint that this process loaded
        self.check_sample = check_sample
        self.lists = 0  # tensors whose names were sent

    def reborn(self) -> None:
        """Restart the process from the newest checkpoint."""
        self.incarnation, self.commands, self.last, self.writing = 0, [], None, None
        self.step_ = max(self.saved)
        self.state = self.saved[self.step_]

    def hello(self) -> Any:
        if not self.incarnation:
            self.loaded = self.digest(self.step_) if self.step_ else ""
        return RegisterTrainer(f"trainer-{id(self)}", self.incarnation, self.step_, self.loaded, self.refused)

    def digest(self, step: int) -> str:
        """Return the digest of the record of a checkpoint."""
        return f"record of {step}"

    def connect(self) -> None:
        super().connect()
        if self.incarnation and self.last is not None:
            self.say(StepDone(self.incarnation, self.last, {"loss": 0.0}))

    def handle(self, message: Any) -> None:
        if isinstance(message, TrainerRegistered):
            self.incarnation = message.incarnation
            self.look_for(message.unseen)
        else:
            self.commands.append(message)

    def look_for(self, unseen: list[int]) -> None:
        """Restart if one of these checkpoints exists, else refuse them."""
        if self.saved.keys() & unseen:
            self.disconnect()
            self.reborn()
            self.connect()
        elif unseen:
            missing = [RefusedCheckpoint(n, f"the trainer did not find checkpoints/step-{n:06d}") for n in unseen]
            self.refused = self.refused + missing
            self.say(self.hello())

    def step(self) -> bool:
        busy = super().step()
        if self.commands and not self.hold and self.peer is not None:
            self._execute(self.commands.pop(0))
            busy = True
        elif self.writing is not None and not self.hold_writes and self.peer is not None:
            self._finish_write()
            busy = True
        return busy

    def _finish_write(self) -> None:
        if self.writing is None:
            return
        step, self.saved[self.writing[0]], remove = self.writing
        self.writing = None
        for old in remove:
            self.saved.pop(old, None)
        self.say(Checkpointed(self.incarnation, step, f"checkpoints/step-{step:06d}", self.digest(step)))

    def _execute(self, command: Any) -> None:
        match command:
            case Train(step=step):
                if step == self.step_:
                    n = len(command.samples)
                    data = zstandard.decompress(
                        BatchShards(self.world.store).shard(step, encode_selection(range(n), n))
                    )
                    self.batches.append((step, data))
                    self.check(command, data)
                    self.state = hashlib.sha256(self.state.encode() + data + self.drift.encode()).hexdigest()
                    self.step_, self.last = step + 1, step
                assert step < self.step_
                self.say(StepDone(self.incarnation, step, {"loss": 0.0}))
            case SendWeights(update=update, engines=engines):
                for target in engines:
                    group = f"group-{update}-{target.engine}"
                    probe = Probe([], [])
                    self.world.broadcasts[group] = self.state
                    parameters = [] if command.tensors == TENSORS_DIGEST else TENSORS
                    self.lists += len(parameters)
                    self.say(
                        WeightGroupReady(
                            self.incarnation,
                            update,
                            target.engine,
                            group,
                            "",
                            0,
                            2,
                            "gloo",
                            parameters,
                            probe,
                            TENSORS_DIGEST,
                        ),
                        WeightsSent(self.incarnation, update, target.engine, self.state, 0.1, ""),
                    )
                if not engines:
                    self.say(WeightsSent(self.incarnation, update, "", self.state, 0.1, ""))
            case Checkpoint(step=step, remove=remove):
                self._finish_write()
                assert step == self.step_
                self.writing = (step, self.state, remove)
                self.say(CheckpointCopied(self.incarnation, step))
            case RefuseCheckpoint(step=step):
                del self.saved[step]
                self.disconnect()
                self.reborn()
                self.connect()

    def check(self, command: Train, data: bytes) -> None:
        samples = msgspec.msgpack.decode(data, type=list[SampleTokens])
        for scalars, tokens in zip(command.samples, samples, strict=True):
            runner = self.world.runner
            self.check_sample(scalars, tokens, runner.turns_of(tokens.sample), runner.credits_of(tokens.sample))
        assert all(command.step - s.min_version <= self.world.alpha for s in command.samples)
        oldest = {s.sample: min(span.version for span in s.spans) for s in samples}
        assert oldest == {s.sample: s.min_version for s in command.samples}


def check_sample(scalars: BatchSample, tokens: SampleTokens, turns: int, credits: list[float]) -> None:
    """Assert that tokens, segments and scalars of a sample agree, and that it has ``turns`` turns."""
    kinds = [segment.kind for segment in tokens.segments]
    assert kinds == ["prompt", "model", "observation", "model", "model"][: 2 * turns if turns < 3 else 5], kinds
    assert [s.start for s in tokens.segments] == [0, *(s.end for s in tokens.segments[:-1])]
    assert tokens.segments[0].end == scalars.prompt_tokens
    assert tokens.segments[-1].end == scalars.total_tokens == len(tokens.token_ids) // 4 == len(tokens.logprobs) // 4
    assert sum(tokens.loss_mask) == scalars.response_tokens == sum(s.end - s.start for s in tokens.spans)
    assert all(
        written or logprob == 0 for logprob, written in zip(array("f", tokens.logprobs), tokens.loss_mask, strict=True)
    )
    rewards = [segment.reward for segment in tokens.segments if segment.kind == "model"]
    assert rewards[:-1] == credits
    assert math.isclose(math.fsum(rewards), scalars.reward)
    if turns > 1:
        between = tokens.segments[2]
        assert tokens.token_ids[4 * between.start : 4 * between.end] == observation(0)


class World:
    """Coordinator, runner, engines and trainer."""

    def __init__(self, manifest: RLJob, storage: Path, engines: int | list[str] = 1) -> None:
        """``engines``: number of engines of pool main, or the pool of each engine."""
        self.manifest, self.storage = manifest, storage
        message_router.RECONNECT_SECONDS = run_module.LOST_SECONDS = 0.0
        self.alpha = manifest.spec.training.max_staleness
        self.broadcasts: dict[str, str] = {}
        self.runner, self.trainer = Runner(self), Trainer(self)
        pools = ["main"] * engines if isinstance(engines, int) else engines
        self.agents = [Agent(self, f"engine-{i}", pool) for i, pool in enumerate(pools)]
        self.reward = lambda sample, result: float(sum(result.token_ids) % 2)
        self.decide: Callable[[FilterGroup], GroupFiltered | None] = accept  # None: no answer
        self.commit_turns = lambda: 0  # turns of the event loop until the coordinator learns that a commit ended

    @property
    def parts(self) -> list[Component]:
        return [self.runner, self.trainer, *self.agents]

    async def start(self) -> None:
        """Start or restart the coordinator."""
        self.store = LedgerWriter(self.storage)
        self.store._thread = InlineExecutor(lambda: self.commit_turns())
        self.store.db.execute("PRAGMA synchronous=OFF")  # a killed process loses nothing that it wrote
        self.run = Run(self.manifest.spec, self.store)
        self.router = MessageRouter(self.run)
        recover(self.run)
        self.committing = asyncio.create_task(self.store.run())
        self.run.changed()

    def kill_coordinator(self) -> None:
        """Kill the coordinator: everything that is not durable is lost."""
        self.committing.cancel()
        assert self.store._thread is not None
        self.store._thread.shutdown(wait=True)
        self.store.segments.close()
        self.store.texts.close()
        assert self.store._checkpoints is not None
        self.store._checkpoints.close()
        self.store._reader.close()
        self.store.db.close()
        self.store.unlock()
        for part in self.parts:
            part.peer = None

    async def settle(self, limit: int = 10_000) -> None:
        """Run until all components are idle."""
        idle = 0
        for _ in range(limit):
            busy = [part.step() for part in self.parts]
            await self.store.drain()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            waiting = any(p.peer is not None and p.peer._outbox for p in self.parts)
            idle = 0 if any(busy) or waiting else idle + 1
            if idle == 3:  # an event may need an iteration of the loop to become a message
                return
        raise AssertionError(f"not idle after {limit} iterations")

    async def some(self, turns: int) -> None:
        """Run ``turns`` iterations."""
        for _ in range(turns):
            for part in self.parts:
                part.step()
            await self.store.drain()
            await asyncio.sleep(0)

    def close(self) -> None:
        """Close the files."""
        self.committing.cancel()
        self.store.close()

    async def inject_fault(self, rng: random.Random) -> None:
        """Kill a random component, or cut its connection; then connect all components."""
        victim = rng.choice(["coordinator", *self.parts])
        if isinstance(victim, str):
            self.kill_coordinator()
            await self.start()
        else:
            victim.disconnect()
            if rng.random() < 0.6:
                victim.reborn()
        self.connect_all()

    def connect_all(self) -> None:
        for part in self.parts:
            if part.peer is None:
                part.connect()

    def check_accounts(self) -> None:
        """Assert that every sample ended once, no sample is in two batches, and every batch was applied."""
        rows = self.store.query("SELECT s.*, g.kind FROM samples s JOIN groups g ON g.id = s.group_id")
        ends = {"trained", "baseline", "filtered", "surplus", "expired", "failed"}
        assert all(
            row["state"] in (ends if row["kind"] == "train" else {"evaluated", "failed", "expired"}) for row in rows
        ), [(row["id"], row["state"]) for row in rows if row["state"] not in ends]
        trained = [row["id"] for row in rows if row["state"] == "trained"]
        listed = [s for row in self.store.query("SELECT samples FROM batches") for s in msgspec.json.decode(row[0])]
        assert sorted(trained) == sorted(listed)
        assert len(set(listed)) == len(listed)
        steps = self.manifest.spec.training.steps
        assert [row[0] for row in self.store.query("SELECT DISTINCT step FROM applied ORDER BY step")] == list(
            range(steps)
        )
