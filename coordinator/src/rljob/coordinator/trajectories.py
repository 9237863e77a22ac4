"""Open samples: leases to runners, generation requests to engines, completions, rewards.

A sample is *leased* to a runner, which asks for *generation*; the request waits for an engine, runs, and its completion
is recorded before any message about it. An interrupted turn continues from its recorded prefix as a new attempt. The
first record of (sample, turn, attempt) counts; later ones are acknowledged and dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from rljob.api.models import RLJobSpec
from rljob.coordinator.connection import Connection
from rljob.coordinator.engines import EngineRecord, Engines
from rljob.coordinator.trajectory import Trajectory, Turn
from rljob.ledger.payload_record import INT32, PayloadRecord
from rljob.ledger.writer import LedgerWriter
from rljob.protocol import messages as m
from rljob.scheduling.dispatch import Request, RequestKey, RequestQueue
from rljob.scheduling.seeds import derive

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.05


class Trajectories:
    """All open samples of one run."""

    def __init__(self, spec: RLJobSpec, ledger: LedgerWriter, engines: Engines, on_change: Callable[[], None]) -> None:
        self._seed = spec.seed
        self._lengths = sorted({pool.max_model_length for pool in spec.rollouts})
        self._ledger = ledger
        self._engines = engines
        self._changed = on_change
        self._runners: dict[Connection, int] = {}  # → capacity
        self._leases: dict[Connection, set[str]] = {}
        self._unleased: dict[str, Trajectory] = {}
        self._claims: dict[RequestKey, EngineRecord] = {}
        """After a restart: requests that run on an engine, but that no runner has asked for again yet."""
        self.queue = RequestQueue()
        self.by_sample: dict[str, Trajectory] = {}
        self.generated_tokens = 0

    # --- samples come and go ---

    def add(self, samples: Iterable[Trajectory]) -> None:
        """Take admitted samples."""
        for trajectory in samples:
            self.by_sample[trajectory.sample.id] = trajectory
            self._unleased[trajectory.sample.id] = trajectory
        self._lease()

    def drop(self, sample_ids: Iterable[str]) -> None:
        """Forget samples that ended; their runners and engines are asked to stop."""
        cancelled: dict[Connection, list[str]] = {}
        for sample_id in sample_ids:
            trajectory = self.by_sample.pop(sample_id, None)
            if trajectory is None:
                continue
            self._unleased.pop(sample_id, None)
            self._withdraw(trajectory)
            if trajectory.runner is not None:
                self._leases[trajectory.runner].discard(sample_id)
                cancelled.setdefault(trajectory.runner, []).append(sample_id)
        for runner, ids in cancelled.items():
            runner.send(m.Cancel(ids))
        self._lease()

    def done(self, sample_id: str) -> None:
        """Forget a sample that its runner finished."""
        trajectory = self.by_sample.pop(sample_id)
        if trajectory.runner is not None:
            self._leases[trajectory.runner].discard(sample_id)
        self._unleased.pop(sample_id, None)
        self._withdraw(trajectory)
        self._lease()

    def start_over(self, trajectory: Trajectory) -> None:
        """Throw away what was generated and start afresh under current weights (a new lineage at α = 0)."""
        self._withdraw(trajectory)
        trajectory.attempts += sum(turn.completions for turn in trajectory.turns.values()) + 1
        self._ledger.discard_generation(trajectory.sample.id, trajectory.attempts)
        trajectory.dispatched = trajectory.recorded_version = trajectory.sample.min_version = None
        trajectory.turns.clear()
        self._take_back(trajectory)

    def current(self, sample: str, attempt: int, runner: Connection) -> Trajectory | None:
        """Return the trajectory that ``runner`` speaks of; None when it ended or the attempt was thrown away. A runner
        that still has a lease of that attempt gets a new one."""
        trajectory = self.by_sample.get(sample)
        if trajectory is None or trajectory.attempts == attempt:
            return trajectory
        if trajectory.runner is runner:
            self._take_back(trajectory)
        return None

    def _take_back(self, trajectory: Trajectory) -> None:
        """End the lease and lease the sample again."""
        sample_id = trajectory.sample.id
        if trajectory.runner is not None:
            trajectory.runner.send(m.Cancel([sample_id]))
            self._leases[trajectory.runner].discard(sample_id)
            trajectory.runner = None
        self._unleased[sample_id] = trajectory
        self._lease()

    # --- runners ---

    def register_runner(self, connection: Connection, capacity: int, driving: list[str]) -> None:
        """A runner (again) takes leases; ``driving`` are those it holds already."""
        for other in list(self._runners):
            if other.instance == connection.instance and other is not connection:
                self._release(other)
        self._runners[connection] = max(1, capacity)
        leases = self._leases.setdefault(connection, set())
        for sample_id in driving:
            trajectory = self.by_sample.get(sample_id)
            if trajectory is None or trajectory.runner not in (None, connection):
                connection.send(m.Cancel([sample_id]))
                continue
            trajectory.runner = connection
            leases.add(sample_id)
            self._unleased.pop(sample_id, None)
        self._lease()

    def lose_runner(self, connection: Connection) -> None:
        """A runner is gone: its leases pass on."""
        self._release(connection)
        self._lease()

    def _release(self, connection: Connection) -> None:
        self._runners.pop(connection, None)
        for sample_id in self._leases.pop(connection, set()):
            trajectory = self.by_sample.get(sample_id)
            if trajectory is not None and trajectory.runner is connection:
                trajectory.runner = None
                self._unleased[sample_id] = trajectory

    def _lease(self) -> None:
        """Give samples without a runner to the runners with the most room."""
        while self._unleased:
            present = [runner for runner in self._runners if runner.open]
            runner = max(present, default=None, key=lambda runner: self._runners[runner] - len(self._leases[runner]))
            if runner is None or len(self._leases[runner]) >= self._runners[runner]:
                return
            sample_id, trajectory = next(iter(self._unleased.items()))
            del self._unleased[sample_id]
            trajectory.runner = runner
            self._leases[runner].add(sample_id)
            turns = [turn.tokens(number) for number, turn in sorted(trajectory.turns.items()) if turn.finished]
            split = "train" if trajectory.version is None else "heldOut"
            lease = m.LeaseTrajectory(sample_id, trajectory.task, trajectory.row, split, turns, trajectory.attempts)
            self._ledger.then(lambda runner=runner, lease=lease: runner.send(lease))  # type: ignore[misc]

    # --- generation ---

    def need(self, need: m.GenerateRequest, runner: Connection) -> None:
        """Handle a runner's request for a turn's tokens; a repeated request is answered from the recorded tokens.

        Raises:
            ValueError: the turn is generated, or was, from another context.
        """
        trajectory = self.current(need.sample, need.attempt, runner)
        if trajectory is None:
            if need.sample not in self.by_sample:
                runner.send(m.Cancel([need.sample]))
            return
        turn = trajectory.turns.get(need.turn)
        if turn is None:
            turn = trajectory.turns[need.turn] = Turn(need)
        if turn.need.prompt != need.prompt and (turn.completions or trajectory.request is not None):
            raise ValueError(
                f"turn {need.turn} was generated from another context than the one it has now; a loop that runs again "
                "must make the same calls"
            )
        turn.need = need
        if turn.completions and turn.room <= 0 and not turn.finished:
            turn.finish = "length"  # it was interrupted at its last token
        if turn.finished:
            if trajectory.runner is not None:
                trajectory.runner.send(m.GenerateResult(need.sample, turn.tokens(need.turn)))
        elif trajectory.request is None:
            self._enqueue(trajectory, need.turn)

    def _enqueue(self, trajectory: Trajectory, number: int) -> None:
        turn = trajectory.turns[number]
        key = (trajectory.sample.id, number, trajectory.attempts + turn.completions)
        tokens = len(turn.need.prompt) // INT32 + turn.need.max_tokens
        shortest = next((length for length in self._lengths if length >= tokens), tokens)
        request = Request(key, trajectory.sample.group.id, trajectory.order, tokens, trajectory.version, shortest)
        trajectory.request = request
        claimant = self._claims.pop(key, None)
        early = trajectory.early.pop(key, None)
        if early is not None:
            self.completed(*early)
        elif claimant is not None:
            claimant.add(request)
        else:
            self.queue.put(request)
            self._changed()

    def dispatch(self, eligible: Callable[[EngineRecord, Request], bool]) -> None:
        """Send waiting requests to engines with room."""
        for request, engine in self.queue.assign(self._engines.connected(), eligible):
            trajectory = self.by_sample[request.key[0]]
            assert engine.connection is not None and engine.serving is not None
            self._started(trajectory, engine.serving[1])
            agent, generate = engine.connection, self._generate(trajectory, request)
            self._ledger.then(lambda agent=agent, generate=generate: agent.send(generate))  # type: ignore[misc]

    def _generate(self, trajectory: Trajectory, request: Request) -> m.Generate:
        sample_id, number, attempt = request.key
        turn = trajectory.turns[number]
        sampling = m.SamplingParams(
            temperature=turn.need.temperature,
            max_tokens=turn.room,
            stop_token_ids=turn.need.stop_token_ids,
            seed=derive(self._seed, sample_id, number, attempt),
        )
        return m.Generate(m.RequestId(*request.key), turn.need.prompt + turn.token_ids, sampling)

    def _started(self, trajectory: Trajectory, version: int) -> None:
        """An engine serving ``version`` has the request from now on: durable before the engine hears of it, so that a
        coordinator that comes back knows how old the tokens may be."""
        trajectory.dispatched = version
        recorded = trajectory.recorded_version
        trajectory.sample.min_version = version if recorded is None else min(recorded, version)
        self._ledger.record_dispatch(trajectory.sample.id, version)

    def completed(self, completion: m.Completion, agent: Connection) -> None:
        """An engine finished a request, or was interrupted in it."""
        request_id = completion.request_id
        key = (request_id.sample, request_id.turn, request_id.attempt)
        trajectory = self.by_sample.get(request_id.sample)
        wanted = (
            trajectory is not None and trajectory.wants(request_id.turn) and request_id.attempt >= trajectory.attempts
        )
        if trajectory is not None and wanted and trajectory.request is None:
            trajectory.early[key] = (completion, agent)  # the runner has not come back yet; not acknowledged
            return
        if trajectory is None or trajectory.request is None or trajectory.request.key != key:
            agent.send(m.AckCompletions([request_id]))
            return
        engine = trajectory.engine
        self._withdraw(trajectory, abort=False)
        turn = trajectory.turns[request_id.turn]
        self._record(trajectory, turn, completion, engine)
        if completion.finish != "abort" or turn.room == 0:
            turn.finish = completion.finish if completion.finish != "abort" else "length"
            generated = m.GenerateResult(request_id.sample, turn.tokens(request_id.turn))
            self._ledger.then(lambda: trajectory.runner.send(generated) if trajectory.runner else None)
        else:
            self._enqueue(trajectory, request_id.turn)
        self._ledger.then(lambda: agent.send(m.AckCompletions([request_id])))
        self._changed()

    def _record(
        self, trajectory: Trajectory, turn: Turn, completion: m.Completion, engine: EngineRecord | None
    ) -> None:
        request_id = completion.request_id
        tokens = len(completion.token_ids) // INT32
        versions = [span.version for span in completion.spans]
        if not versions and completion.finish != "abort":  # it ended without a token: the version decided that
            serving = engine.serving[1] if engine is not None and engine.serving is not None else trajectory.dispatched
            versions = [serving] if serving is not None else []
        known = [*versions, *([] if trajectory.recorded_version is None else [trajectory.recorded_version])]
        trajectory.recorded_version = min(known, default=None)
        trajectory.sample.min_version = trajectory.recorded_version
        trajectory.dispatched = None
        turn.token_ids += completion.token_ids
        turn.completions += 1
        self.generated_tokens += tokens
        record = PayloadRecord(
            request_id.sample, request_id.turn, request_id.attempt, turn.need.prompt, completion.token_ids,
            completion.logprobs, completion.spans, completion.finish,
        )  # fmt: skip
        name = engine.instance if engine is not None else ""
        total = (len(turn.need.prompt) + len(turn.token_ids)) // INT32
        self._ledger.record_completion(record, name, total, trajectory.recorded_version, max(versions, default=None))

    def _withdraw(self, trajectory: Trajectory, abort: bool = True) -> None:
        """Take the trajectory's request back from wherever it is."""
        request, engine = trajectory.request, trajectory.engine
        trajectory.request = None
        if request is None:
            return
        if engine is None:
            self.queue.cancel(request)
            return
        engine.remove(request.key)
        if abort and engine.connection is not None:
            engine.connection.send(m.Abort([m.RequestId(*request.key)], discard=True))

    # --- engines ---

    def register_engine(self, engine: EngineRecord, running: list[m.RequestId]) -> None:
        """An agent says what its engine has in hand: what we do not want is aborted, what we think it has but it has
        not is dispatched again."""
        held = {(request_id.sample, request_id.turn, request_id.attempt) for request_id in running}
        self._forget_claims(engine)
        for key in [key for key in engine.requests if key not in held]:
            self._requeue(engine, key)
        for key in held:
            trajectory = self.by_sample.get(key[0])
            if trajectory is None or (trajectory.request is not None and trajectory.request.key != key):
                self._abort(engine, key)
            elif trajectory.request is None:
                if trajectory.wants(key[1]):
                    self._claims[key] = engine
                else:
                    self._abort(engine, key)
            elif trajectory.request.engine is None:
                self.queue.cancel(trajectory.request)
                trajectory.request = replace(trajectory.request)  # the one before stays in the queue, as cancelled
                engine.add(trajectory.request)
            elif trajectory.engine is not engine:
                self._abort(engine, key)
        self._changed()

    def _abort(self, engine: EngineRecord, key: RequestKey) -> None:
        if engine.connection is not None:
            engine.connection.send(m.Abort([m.RequestId(*key)], discard=True))

    def claimed(self, engine: EngineRecord) -> bool:
        """Whether, after a restart, an engine has requests that no runner has asked for again yet."""
        return any(claimant is engine for claimant in self._claims.values())

    def interrupt(self, engine: EngineRecord) -> None:
        """Have a connected engine end all it has where it is: each request comes back as an aborted completion, which
        is recorded, and continues from there."""
        assert engine.connection is not None
        engine.connection.send(m.Abort([m.RequestId(*key) for key in engine.requests], discard=False))

    def lose_engine(self, engine: EngineRecord) -> None:
        """An engine is gone: its requests go to others. Nothing of them was recorded, so the attempt stays."""
        for key in list(engine.requests):
            self._requeue(engine, key)
        self._forget_claims(engine)

    def _forget_claims(self, engine: EngineRecord) -> None:
        self._claims = {key: claimant for key, claimant in self._claims.items() if claimant is not engine}

    def returned(self, engine: EngineRecord, request_id: m.RequestId) -> int:
        """An engine could not do a request: dispatch it again, later with every time it comes back.

        Returns how often the sample came back by now.
        """
        self._claims.pop((request_id.sample, request_id.turn, request_id.attempt), None)
        request = engine.remove((request_id.sample, request_id.turn, request_id.attempt))
        trajectory = self.by_sample.get(request_id.sample)
        if request is None or trajectory is None or trajectory.request is not request:
            return 0
        trajectory.sample.min_version = trajectory.recorded_version
        trajectory.returns += 1
        pause = FIRST_PAUSE_SECONDS * 2**trajectory.returns
        asyncio.get_running_loop().call_later(pause, self._put_back, request)
        return trajectory.returns

    def _requeue(self, engine: EngineRecord, key: RequestKey) -> None:
        request = engine.remove(key)
        if request is not None:
            self._put_back(request)

    def _put_back(self, request: Request) -> None:
        """Queue a request again, unless its sample is no longer waiting for it."""
        trajectory = self.by_sample.get(request.key[0])
        if trajectory is not None and trajectory.request is request:
            trajectory.dispatched, trajectory.sample.min_version = None, trajectory.recorded_version
            self.queue.put(request)
            self._changed()

    @property
    def runners(self) -> list[Connection]:
        """Runners that are connected."""
        return [connection for connection in self._runners if connection.open]

    def counts(self) -> dict[str, int]:
        """Return how many samples are where."""
        running = sum(len(engine.requests) for engine in self._engines.by_instance.values())
        return {
            "unleased": len(self._unleased),
            "waiting": len(self.queue),
            "generating": running,
            "scoring": len(self.by_sample) - len(self._unleased) - len(self.queue) - running,
        }
