"""A simulated agent with its engine: requests run in slots and share the engine's rate of decoding.

Each request has an amount of work. With c running requests each gets ``rate(c)`` units of work a second. The engine is
paused while it receives weights.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from rljob.protocol.agent_protocol import (
    HEARTBEAT_SECONDS,
    Abort,
    AckCompletions,
    Completion,
    Completions,
    EngineHeartbeat,
    Forget,
    Generate,
    PrefixMissing,
    PrepareWeights,
    RegisterEngine,
    RequestId,
    WeightAck,
    WeightFailed,
)
from rljob.protocol.contexts import KeptContexts
from rljob.protocol.known_tensors import KnownTensors
from rljob.protocol.shared_messages import VersionSpan
from rljob.protocol.trainer_protocol import Train
from rljob.scheduling.request import RequestKey
from rljob.simulation.memory_link import MemoryLink, MemoryServer, Traffic

ONE_TOKEN = bytes(4)
"""Token ids and log-probabilities of every completion: a simulated answer is one token, whatever its work."""
Turn = tuple[str, int, str]
"""Sample, turn and branch."""
KEPT_BYTES = 1 << 20
"""Bound of the contexts that the agent keeps."""


@dataclass(frozen=True)
class EngineModel:
    """What an engine can do.

    ``slots``: requests that run at a time. ``rate``: units of work per second of one request that runs alone. ``peak``:
    units of work per second of all running requests together.
    """

    slots: int
    rate: float = 1.0
    peak: float = math.inf

    def rate_of_each(self, running: int) -> float:
        """Return the units of work per second of each of ``running`` requests."""
        return min(self.rate, self.peak / running) if running else 0.0


class SimulationRecorder(Protocol):
    """Receives what engines and trainer did, in seconds of virtual time."""

    def generated(self, engine: str, slot: int, request: RequestId, start: float, end: float, work: float) -> None:
        """Record a request that an engine finished or interrupted; ``work``: done."""

    def updated(self, engine: str, version: int, start: float, end: float) -> None:
        """Record a weight update of an engine."""

    def trained(self, batch: Train, start: float, end: float) -> None:
        """Record a step of the trainer."""


@dataclass(eq=False)
class _Running:
    request: Generate
    slot: int
    version: int
    start: float  # virtual time
    start_work: float  # served work at which it started
    end_work: float  # and at which it ends
    aborted: bool = field(default=False)


class SimulatedEngine:
    """One engine with its agent.

    Args:
        name: instance name.
        pool: name of its pool.
        model: of the engine.
        max_model_length: tokens.
        work: returns the work of a request.
        sync_seconds: duration of a weight update.
        recorder: receives what the engine does.
        left: work of interrupted turns; all engines of a run share it, so that a turn may continue on another one.
    """

    def __init__(
        self,
        name: str,
        pool: str,
        model: EngineModel,
        max_model_length: int,
        work: Callable[[Generate], float],
        sync_seconds: float,
        recorder: SimulationRecorder,
        left: dict[Turn, float],
    ) -> None:
        self.name = name
        self._pool = pool
        self._model = model
        self._max_model_length = max_model_length
        self._work = work
        self._sync_seconds = sync_seconds
        self._recorder = recorder
        self._running: dict[RequestKey, _Running] = {}
        self._held: dict[RequestKey, Generate] = {}
        self._left = left
        self._ends: list[tuple[float, int, _Running]] = []  # heap
        self._tie = 0
        self._free_slots = list(range(model.slots))
        self._rates = [model.rate_of_each(running) for running in range(model.slots + 1)]
        self._served = 0.0  # units of work that each request that is always running would have got
        self._done = 0.0  # units of work of all requests
        self._marked = 0.0  # virtual time of both
        self._timer: asyncio.TimerHandle | None = None
        self._ends_next: _Running | None = None  # the request that the timer is for, and the rate of each
        self._ends_at_rate = 0.0
        self._paused = False
        self._tensors = KnownTensors()
        self._weights = (-1, -1, "")  # lineage, version, digest
        self._unacknowledged: dict[RequestKey, Completion] = {}
        self._contexts = KeptContexts(KEPT_BYTES)
        self._killed = False

    def connect(self, server: MemoryServer, traffic: Traffic) -> MemoryLink:
        """Connect to the coordinator."""
        self._loop = asyncio.get_running_loop()
        self._link = MemoryLink(server, "agent", self.name, self._register, traffic, self._receive)
        self._link.connect()
        self._beat()
        return self._link

    def kill(self) -> None:
        """End the process: everything that it has is lost."""
        self._killed = True
        if self._timer is not None:
            self._timer.cancel()
        self._link.cut()

    def work_done(self) -> float:
        """Return the units of work done so far, those of unfinished requests included."""
        running = 0 if self._paused else len(self._running)
        return self._done + (self._loop.time() - self._marked) * self._rates[running] * running

    def _register(self) -> list[Any]:
        lineage, version, digest = self._weights
        ids = [running.request.request_id for running in self._running.values()]
        ids += [request.request_id for request in self._held.values()]
        registration = RegisterEngine(
            self.name, self._pool, self._model.slots, self._max_model_length, lineage, version, ids, digest
        )
        return [registration, *([Completions(list(self._unacknowledged.values()))] if self._unacknowledged else [])]

    def _beat(self) -> None:
        if self._killed:
            return
        self._link.send(EngineHeartbeat("ready", len(self._running), len(self._held), 0))
        self._loop.call_later(HEARTBEAT_SECONDS, self._beat)

    def _receive(self, frame: list[Any]) -> None:
        for message in frame:
            match message:
                case Generate():
                    self._take(message)
                case Forget():
                    self._contexts.forget(message.contexts)
                case AckCompletions():
                    for each in message.request_ids:
                        self._unacknowledged.pop(each.key, None)
                case PrepareWeights() if message.engine == self.name:
                    self._prepare(message)
                case Abort():
                    for each in message.request_ids:
                        self._abort(each, message.discard)
        self._schedule()

    # --- requests ---

    def _take(self, message: Generate) -> None:
        key = message.request_id.key
        if key in self._running or key in self._unacknowledged or key in self._held:
            return
        request = self._contexts.whole(message)
        if request is None:
            self._link.send(PrefixMissing(message.request_id))
            return
        if len(self._running) < self._model.slots and not self._paused:
            self._start(request)
        else:
            self._held[key] = request

    def _start(self, request: Generate) -> None:
        self._mark()
        turn = (request.request_id.sample, request.request_id.turn, request.request_id.branch)
        work = self._left.pop(turn, None)
        work = self._work(request) if work is None else work
        now = self._loop.time()
        slot = heapq.heappop(self._free_slots)
        running = _Running(request, slot, self._weights[1], now, self._served, self._served + work)
        self._running[request.request_id.key] = running
        self._tie += 1
        heapq.heappush(self._ends, (running.end_work, self._tie, running))

    def _mark(self) -> None:
        """Account for the work since the last change."""
        now = self._loop.time()
        if not self._paused:
            served = (now - self._marked) * self._rates[len(self._running)]
            self._served += served
            self._done += served * len(self._running)
        self._marked = now

    def _schedule(self) -> None:
        """Set the timer for the next request that ends, unless it is set."""
        ends = self._ends
        while ends and ends[0][2].aborted:
            heapq.heappop(ends)
        next_ = ends[0][2] if ends and not self._paused else None
        rate = self._rates[len(self._running)]
        if next_ is self._ends_next and rate == self._ends_at_rate:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._ends_next, self._ends_at_rate = next_, rate
        if next_ is not None:
            self._mark()
            self._timer = self._loop.call_later(max(0.0, next_.end_work - self._served) / rate, self._end_next)

    def _end_next(self) -> None:
        self._timer = self._ends_next = None
        self._mark()
        end_work, _, running = heapq.heappop(self._ends)
        self._served = end_work  # exactly: rounding must not let it run again
        self._finish(running, "stop")
        self._fill()
        self._schedule()

    def _finish(self, running: _Running, finish: str) -> None:
        self._remove(running)
        request = running.request
        completion = Completion(
            request.request_id, ONE_TOKEN, ONE_TOKEN, [VersionSpan(running.version, 0, 1)], finish,
            self._loop.time() - running.start, request.context,
        )  # fmt: skip
        self._contexts.keep(request.request_id, request.token_ids + ONE_TOKEN)
        self._unacknowledged[request.request_id.key] = completion
        self._link.send(Completions([completion]))

    def _remove(self, running: _Running) -> None:
        now = self._loop.time()
        del self._running[running.request.request_id.key]
        heapq.heappush(self._free_slots, running.slot)
        done = self._served - running.start_work
        self._recorder.generated(self.name, running.slot, running.request.request_id, running.start, now, done)

    def _fill(self) -> None:
        while self._held and len(self._running) < self._model.slots and not self._paused:
            self._start(self._held.pop(next(iter(self._held))))

    def _abort(self, request_id: RequestId, discard: bool) -> None:
        key = request_id.key
        running = self._running.get(key)
        if running is None:
            if discard:
                self._held.pop(key, None)
            return
        self._mark()
        running.aborted = True
        if discard:
            self._remove(running)
        else:
            self._left[request_id.sample, request_id.turn, request_id.branch] = running.end_work - self._served
            self._finish(running, "abort")
        self._fill()

    # --- weights ---

    def _prepare(self, message: PrepareWeights) -> None:
        if self._tensors.of(message.tensors, message.parameters) is None:
            self._link.send(WeightFailed(message.update, "the list of tensors is unknown"))
            return
        self._mark()
        self._paused = True
        if message.in_flight == "abort":
            for key in list(self._running):
                self._abort(RequestId(*key), discard=False)
        self._loop.call_later(self._sync_seconds, self._commit, message, self._loop.time())

    def _commit(self, message: PrepareWeights, start: float) -> None:
        if self._killed:
            return
        self._mark()
        self._paused = False
        digest = weight_digest(message.version)
        self._weights = (message.lineage, message.version, digest)
        seconds = self._loop.time() - start
        ack = WeightAck(message.update, message.lineage, message.version, digest, 0.0, 0.0, seconds, seconds, 0.0)
        self._link.send(ack)
        self._recorder.updated(self.name, message.version, start, self._loop.time())
        self._fill()
        self._schedule()


def weight_digest(version: int) -> str:
    """Return the digest of the simulated weights of a version."""
    return f"weights-{version}"
