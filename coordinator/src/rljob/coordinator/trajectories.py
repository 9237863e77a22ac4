"""Open samples: leases to runners, generation requests to engines, completions, rewards.

A sample is *leased* to a runner, which requests *generation*; the request waits for an engine, runs, and its completion
is recorded before any message about it is sent. An interrupted turn continues from its recorded prefix as a new
attempt. The first record of (sample, turn, attempt, branch) counts; later ones are acknowledged and dropped. The
branches of a sample generate at the same time, each by a request of its own.

A loop that runs again makes the same calls, so another lease continues its turns. An agent program does not: with
another lease it begins again, and the tokens of the lease before are discarded.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from functools import cached_property
from typing import TypeAlias

from rljob.api.models import RLJobSpec
from rljob.coordinator.connection import Connection
from rljob.coordinator.engines import EngineRecord, Engines
from rljob.coordinator.event_counts import Abort, EventCounts, Requeue
from rljob.coordinator.leases import Leases
from rljob.coordinator.trajectory import ANOTHER_CONTEXT, Branch, Trajectory, Turn
from rljob.ledger.payload_record import INT32, PayloadRecord
from rljob.ledger.writer import LedgerWriter
from rljob.protocol import agent_protocol, branches
from rljob.protocol.agent_protocol import AckCompletions, Completion, Generate, RequestId
from rljob.protocol.runner_protocol import (
    Cancel,
    GenerateRequest,
    GenerateResult,
    PoolAnswered,
    PoolAnswerStored,
    TrajectoryFailed,
    TrajectoryScored,
)
from rljob.scheduling.dispatch import RequestQueue
from rljob.scheduling.request import Request, RequestKey, RequestKind
from rljob.scheduling.seeds import derive

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.05

FromLease: TypeAlias = GenerateRequest | PoolAnswered | TrajectoryScored | TrajectoryFailed
"""Messages of the runner that holds a lease."""


class Trajectories:
    """All open samples of one run."""

    def __init__(
        self,
        spec: RLJobSpec,
        ledger: LedgerWriter,
        engines: Engines,
        events: EventCounts,
        on_change: Callable[[], None],
    ) -> None:
        self._seed = spec.seed
        self._lengths = sorted({pool.max_model_length for pool in spec.policy_pools})
        self._ledger = ledger
        self._engines = engines
        self._events = events
        self._changed = on_change
        self._agent_tasks = {task.name for task in spec.tasks if task.agent is not None}
        self._leases = Leases(ledger, self._before_lease, events)
        self._claims: dict[RequestKey, EngineRecord] = {}
        """After a restart: requests that run on an engine, but that no runner has repeated yet."""
        self.queue = RequestQueue(engines.ranks)
        self.by_sample: dict[str, Trajectory] = {}
        self.generated_tokens = 0

    def restore(self, starts: int) -> None:
        """Continue the numbers of leases in the coordinator process number ``starts``: the numbers of each process are
        higher than those of all processes before it."""
        self._leases.restore(starts)

    # --- admission and end of samples ---

    def add(self, samples: Iterable[Trajectory]) -> None:
        """Add admitted samples and lease them."""
        for trajectory in samples:
            self.by_sample[trajectory.sample.id] = trajectory
            self._leases.wait(trajectory)
        self._leases.assign()

    def drop(self, sample_ids: Iterable[str]) -> None:
        """Remove samples that ended, and cancel the work of their runners and engines."""
        cancelled: dict[Connection, list[str]] = {}
        for sample_id in sample_ids:
            trajectory = self.by_sample.pop(sample_id, None)
            if trajectory is None:
                continue
            self._end(trajectory)
            if trajectory.runner is not None:
                cancelled.setdefault(trajectory.runner, []).append(sample_id)
        for runner, ids in cancelled.items():
            runner.send(Cancel(ids))
        self._leases.assign()

    def done(self, sample_id: str) -> None:
        """Remove a sample that its runner finished."""
        self._end(self.by_sample.pop(sample_id))
        self._leases.assign()

    def _end(self, trajectory: Trajectory) -> None:
        self._leases.remove(trajectory)
        self._withdraw_all(trajectory, "ended")
        trajectory.forget_contexts()
        self._acknowledge_early(trajectory)

    def start_over(self, trajectory: Trajectory) -> None:
        """Discard the generated tokens of a sample and generate it again with current weights (after a new lineage)."""
        self._discard(trajectory)
        self._leases.release(trajectory, "new_lineage")

    def _before_lease(self, trajectory: Trajectory) -> None:
        """Discard what an agent program generated under an earlier lease."""
        if trajectory.task in self._agent_tasks and trajectory.generated:
            self._discard(trajectory)

    def _discard(self, trajectory: Trajectory) -> None:
        """Discard the generated tokens of a sample and its open requests."""
        self._withdraw_all(trajectory, "discarded")
        trajectory.discard(trajectory.attempts + sum(turn.completions for turn in trajectory.turns.values()) + 1)
        self._ledger.discard_generation(trajectory.sample.id, trajectory.attempts)
        self._acknowledge_early(trajectory)

    @staticmethod
    def _acknowledge_early(trajectory: Trajectory) -> None:
        """Have the agents forget completions that no runner has requested again."""
        for completion, agent in trajectory.early.values():
            agent.send(AckCompletions([completion.request_id]))
        trajectory.early.clear()

    def current(self, message: FromLease, runner: Connection) -> Trajectory | None:
        """Return the trajectory that a message of ``runner`` is about; None if it ended, if ``runner`` does not hold
        the message's lease, or if its attempt was discarded. In the last case the sample is leased again."""
        trajectory = self.by_sample.get(message.sample)
        if trajectory is None or trajectory.runner is not runner or trajectory.lease != message.lease:
            return None
        if trajectory.attempts == message.attempt:
            return trajectory
        self._leases.release(trajectory, "repeated_lease")
        return None

    # --- runners ---

    def register_runner(self, connection: Connection, capacity: int, driving: Mapping[str, int]) -> None:
        """Register a runner; see :meth:`Leases.register`."""
        self._leases.register(connection, capacity, driving, self.by_sample)

    def lose_runner(self, connection: Connection) -> None:
        """Remove a runner; its leases go to other runners."""
        self._leases.lose(connection)

    def next_number(self) -> int:
        """Return a number as that of a lease: unique in the run, and growing."""
        return self._leases.next_number()

    @property
    def runners(self) -> list[Connection]:
        """The connected runners."""
        return self._leases.runners

    def _current_or_cancelled(self, message: FromLease, runner: Connection) -> Trajectory | None:
        """Return :meth:`current`; if ``runner`` does not hold the sample, have it drop it."""
        trajectory = self.current(message, runner)
        if trajectory is None:
            known = self.by_sample.get(message.sample)
            if known is None or known.runner is not runner:  # else the message crossed a new lease to the runner
                runner.send(Cancel([message.sample]))
        return trajectory

    # --- generation ---

    def store_answer(self, message: PoolAnswered, runner: Connection) -> None:
        """Record the answer of a frozen pool, unless one with its key is recorded; send the one that counts once it is
        durable.

        Raises:
            ValueError: it is malformed.
        """
        trajectory = self._current_or_cancelled(message, runner)
        if trajectory is None:
            return
        answer, new = trajectory.answer_of(message)
        if new:
            self._ledger.record_answer(message.sample, trajectory.attempts, answer)
            trajectory.since = self._now()
        stored = PoolAnswerStored(message.sample, answer)
        self._ledger.then(runner.send, stored)

    def request_generation(self, message: GenerateRequest, runner: Connection) -> None:
        """Handle a runner's request for the tokens of a turn; recorded tokens answer a repeated request.

        Raises:
            ValueError: as :meth:`Trajectory.turn_of`.
        """
        trajectory = self._current_or_cancelled(message, runner)
        if trajectory is None:
            return
        turn = trajectory.turn_of(message)
        if not turn.finished:
            turn.request = message
            if turn.completions and turn.remaining_tokens <= 0:
                turn.end("length")  # interrupted at its last token
        if turn.finished:
            result = turn.result(message.sample, message.turn, message.branch)
            self._ledger.then(runner.send, result)  # its completion may not be durable yet
        elif trajectory.branches[message.branch].request is None:
            self._enqueue(trajectory, trajectory.branches[message.branch], message.turn)

    def _enqueue(self, trajectory: Trajectory, branch: Branch, number: int) -> None:
        turn = trajectory.turns[number, branch.name]
        key = (trajectory.sample.id, number, trajectory.attempts + turn.completions, branch.name)
        assert turn.request is not None
        tokens = turn.context_tokens + turn.request.max_tokens
        fitting = bisect_left(self._lengths, tokens)
        min_model_length = self._lengths[fitting] if fitting < len(self._lengths) else tokens
        request = Request(
            key, trajectory.sample.group.prefix, trajectory.order, tokens, trajectory.version, min_model_length,
            branch.previous, turn.context_tokens,
        )  # fmt: skip
        branch.request, trajectory.since = request, self._now()
        claimant = self._claims.pop(key, None)
        early = trajectory.early.pop(key, None)
        if early is not None:
            self.completed(*early)
        elif claimant is not None:
            claimant.add(request)
        else:
            self.queue.put(request)
            self._changed()

    def dispatch(self, eligible: Callable[[EngineRecord, RequestKind], bool], start_groups: bool) -> None:
        """Send queued requests to eligible engines with free slots; ``start_groups``: also of groups of training of
        which no engine had a request yet."""
        if not self.queue:
            return
        for request, engine in self.queue.assign(eligible, start_groups):
            trajectory = self.by_sample[request.key[0]]
            branch = trajectory.branches[request.key[3]]
            branch.previous = engine
            assert engine.connection is not None and engine.serving is not None
            self._started(trajectory, branch, engine.serving[1])
            agent, generate = engine.connection, self._generate(trajectory, request, engine)
            branch.sent_to(trajectory.sample.id, engine)
            self._ledger.then(agent.send, generate)

    def send_whole_context(self, engine: EngineRecord, request_id: RequestId) -> None:
        """Send a request again, with its whole context, to an engine whose agent lacks the beginning of it."""
        request = engine.requests.get(request_id.key)
        if request is not None and engine.connection is not None:
            engine.connection.send(self._generate(self.by_sample[request_id.sample], request, None))

    def _generate(self, trajectory: Trajectory, request: Request, engine: EngineRecord | None) -> Generate:
        return trajectory.generate(RequestId(*request.key), derive(self._seed, *request.key), engine)

    def _started(self, trajectory: Trajectory, branch: Branch, version: int) -> None:
        """Record that an engine serving ``version`` gets the request, if it is the first one of the group or follows
        discarded tokens. The record is durable before the request is sent, so that a restarted coordinator has a lower
        bound of the version of the tokens."""
        branch.dispatched, trajectory.dispatched_before, trajectory.since = version, None, self._now()
        trajectory.bound_version()
        group = trajectory.sample.group
        if group.dispatched is None:
            group.dispatched = version
            self._ledger.record_first_dispatch(group.id, version)
        if trajectory.attempts:
            self._ledger.record_dispatch_again(trajectory.sample.id, version)

    def completed(self, completion: Completion, agent: Connection) -> None:
        """Handle the completion of a request, finished or interrupted.

        Raises:
            ValueError: it was generated from another context than its turn has.
        """
        request_id = completion.request_id
        key, place = request_id.key, (request_id.turn, request_id.branch)
        trajectory = self.by_sample.get(request_id.sample)
        branch = None if trajectory is None else trajectory.branches.get(request_id.branch)
        request = None if branch is None else branch.request
        if (
            request is None
            and trajectory is not None
            and trajectory.wants(place)
            and request_id.attempt >= trajectory.attempts
        ):
            trajectory.early[key] = (completion, agent)  # the runner has not repeated its request yet; not acknowledged
            return
        if trajectory is None or branch is None or request is None or request.key != key:
            agent.send(AckCompletions([request_id]))
            return
        turn = trajectory.turns[place]
        if completion.context != branch.digest.digest():
            # Requested from a coordinator that was killed, by a run of the loop that made other calls.
            raise ValueError(ANOTHER_CONTEXT.format(branches.described(*place)))
        engine = self._engines.of_connection(agent)
        updating = engine is not None and engine.update is not None
        self._withdraw(trajectory, branch, "elsewhere", abort=request.engine is not engine)
        self._record(trajectory, branch, turn, completion, engine, agent.instance)
        if completion.finish != "abort" or turn.remaining_tokens == 0:
            turn.end(completion.finish if completion.finish != "abort" else "length")
            trajectory.since = self._now()
            generated = turn.result(request_id.sample, *place)
            self._ledger.then(self._send_result, trajectory, generated)
        else:
            self._events.requeued("update" if updating else "interrupted")
            self._enqueue(trajectory, branch, request_id.turn)
        self._ledger.then_join(agent.acknowledge_completions, request_id)
        self._changed()

    @staticmethod
    def _send_result(trajectory: Trajectory, result: GenerateResult) -> None:
        """Send a result to the runner that holds the lease now."""
        if trajectory.runner is not None:
            trajectory.runner.send(result)

    def _record(
        self,
        trajectory: Trajectory,
        branch: Branch,
        turn: Turn,
        completion: Completion,
        engine: EngineRecord | None,
        name: str,
    ) -> None:
        request_id = completion.request_id
        tokens = len(completion.token_ids) // INT32
        versions = [span.version for span in completion.spans]
        if not versions and completion.finish != "abort":
            # No tokens: attribute the completion to the version that the engine serves.
            serving = engine.serving[1] if engine is not None and engine.serving is not None else branch.dispatched
            versions = [serving] if serving is not None else []
        known = versions if trajectory.recorded_version is None else [*versions, trajectory.recorded_version]
        trajectory.recorded_version = min(known, default=None)
        branch.dispatched = trajectory.dispatched_before = None
        trajectory.bound_version()
        given = b"" if turn.completions else turn.given
        turn.context = turn.context or completion.context
        turn.token_ids += completion.token_ids
        turn.completions += 1
        branch.append(completion.token_ids)
        branch.kept(request_id.sample, engine)
        branch.returns = 0 if tokens else branch.returns
        self.generated_tokens += tokens
        record = PayloadRecord(
            request_id.sample, request_id.turn, request_id.attempt, given, completion.token_ids,
            completion.logprobs, completion.spans, completion.finish, completion.context, branch.name,
        )  # fmt: skip
        highest = max(versions, default=None)
        self._ledger.record_completion(record, name, branch.tokens, trajectory.recorded_version, highest)

    def _withdraw_all(self, trajectory: Trajectory, reason: Abort) -> None:
        """Withdraw the requests of all branches, also those that no runner has repeated yet."""
        for branch in trajectory.branches.values():
            self._withdraw(trajectory, branch, reason)
        if self._claims:
            self._abort_claims([key for key in self._claims if key[0] == trajectory.sample.id], reason)

    def _withdraw(self, trajectory: Trajectory, branch: Branch, reason: Abort, abort: bool = True) -> None:
        """Remove the branch's request from the queue or from its engine, which aborts it unless it has ended it."""
        request, engine = branch.request, branch.engine
        branch.request = None
        if self._claims:
            of_branch = (trajectory.sample.id, branch.name)
            self._abort_claims([key for key in self._claims if (key[0], key[3]) == of_branch], reason)
        if request is None:
            return
        if engine is None:
            self.queue.cancel(request)
            return
        engine.remove(request.key)
        if abort:
            self._abort(engine, request.key, reason)

    def _abort_claims(self, keys: Iterable[RequestKey], reason: Abort) -> None:
        for key in keys:
            self._abort(self._claims.pop(key), key, reason)

    # --- engines ---

    def register_engine(self, engine: EngineRecord, running: list[RequestId]) -> None:
        """Reconcile the requests of an engine with those that its agent reports as ``running``: unwanted ones are
        aborted, missing ones are dispatched again."""
        held = dict.fromkeys(request_id.key for request_id in running)
        self._forget_claims(engine)
        for key in [key for key in engine.requests if key not in held]:
            self._requeue(engine, key, "not_held")
        for key in held:
            trajectory = self.by_sample.get(key[0])
            branch = None if trajectory is None else trajectory.branches.get(key[3])
            request = None if branch is None else branch.request
            if trajectory is None or (request is not None and request.key != key):
                self._abort(engine, key, "not_wanted")
            elif branch is None or request is None:
                if trajectory.wants((key[1], key[3])) and key[2] >= trajectory.attempts:
                    self._claims[key] = engine
                else:
                    self._abort(engine, key, "not_wanted")
            elif request.engine is None:
                self.queue.cancel(request)
                branch.request = copy(request)  # the cancelled object stays in the queue
                engine.add(branch.request)
            elif request.engine is not engine:
                self._abort(engine, key, "not_wanted")
        self._changed()

    def _abort(self, engine: EngineRecord, key: RequestKey, reason: Abort) -> None:
        if engine.connection is not None:
            self._events.aborted(reason)
            engine.connection.send(agent_protocol.Abort([RequestId(*key)], discard=True))

    def busy(self, engine: EngineRecord) -> bool:
        """Whether an engine has requests, also requests that, after a restart, no runner has repeated yet."""
        return bool(engine.requests) or any(claimant is engine for claimant in self._claims.values())

    def interrupt(self, engine: EngineRecord) -> None:
        """Abort all requests of a connected engine without discarding tokens: each returns as an aborted completion, is
        recorded, and continues from there."""
        assert engine.connection is not None
        self._events.aborted("drained", len(engine.requests))
        engine.connection.send(agent_protocol.Abort([RequestId(*key) for key in engine.requests], discard=False))

    def lose_engine(self, engine: EngineRecord, reason: Requeue) -> None:
        """Requeue the requests of a lost engine. None of their tokens was recorded, so the attempt stays the same."""
        for key in list(engine.requests):
            self._requeue(engine, key, reason)
        self._forget_claims(engine)

    def _forget_claims(self, engine: EngineRecord) -> None:
        self._claims = {key: claimant for key, claimant in self._claims.items() if claimant is not engine}

    def returned(self, engine: EngineRecord, request_id: RequestId) -> int:
        """Dispatch a request again that an engine failed to run, with an exponentially growing delay.

        Returns how often requests of the branch have failed since its last tokens; 0 if the request is no longer
        current.
        """
        self._claims.pop(request_id.key, None)
        request = engine.remove(request_id.key)
        trajectory = self.by_sample.get(request_id.sample)
        branch = None if request is None or trajectory is None else trajectory.branch_of(request)
        if request is None or trajectory is None or branch is None:
            return 0
        branch.dispatched = trajectory.dispatched_before = None
        trajectory.bound_version()
        branch.returns += 1
        self._events.requeued("engine_failed")
        pause = FIRST_PAUSE_SECONDS * 2**branch.returns
        asyncio.get_running_loop().call_later(pause, self._put_back, request)
        return branch.returns

    def _requeue(self, engine: EngineRecord, key: RequestKey, reason: Requeue) -> None:
        request = engine.remove(key)
        if request is not None:
            self._events.requeued(reason)
            self._put_back(request)

    def _put_back(self, request: Request) -> None:
        """Queue a request again if it is still the current request of its branch."""
        trajectory = self.by_sample.get(request.key[0])
        branch = None if trajectory is None else trajectory.branch_of(request)
        if trajectory is not None and branch is not None:
            branch.dispatched = trajectory.dispatched_before = None
            trajectory.bound_version()
            self.queue.put(request)
            self._changed()

    @cached_property
    def _now(self) -> Callable[[], float]:
        return asyncio.get_running_loop().time

    def counts(self) -> dict[str, int]:
        """Return state → number of samples; of those that wait for an engine or generate, of their requests."""
        running = sum(len(engine.requests) for engine in self._engines.by_instance.values())
        return {
            "unleased": self._leases.waiting,
            "waiting": len(self.queue),
            "generating": running,
            "scoring": sum(not trajectory.requests for trajectory in self.by_sample.values()) - self._leases.waiting,
        }
