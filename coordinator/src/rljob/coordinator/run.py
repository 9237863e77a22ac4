"""One run: connects scheduler, trajectories, trainer, weights and evaluations.

Every event changes state immediately, queues its writes, and schedules :meth:`Run.advance`, which takes the next steps
from current state. External effects wait for the ledger (see :class:`rljob.ledger.store.Store`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import groupby
from typing import Any

from rljob.api.algorithm_presets import needs_states
from rljob.api.job_status import MOST_WARNINGS
from rljob.api.models import RLJobSpec
from rljob.coordinator.answer_lengths import AnswerLengths
from rljob.coordinator.draining import Draining
from rljob.coordinator.earlier_steps import EarlierStepsHistory
from rljob.coordinator.engines import EngineRecord, Engines
from rljob.coordinator.evaluations import Evaluations
from rljob.coordinator.group_decisions import GroupDecisions
from rljob.coordinator.progress import RunHistory
from rljob.coordinator.role_loads import RoleLoads
from rljob.coordinator.sample_outcomes import SampleOutcomes
from rljob.coordinator.scheduler_settings import scheduler_settings
from rljob.coordinator.silent_engines import SilentEngines
from rljob.coordinator.trainer_control import TrainerController
from rljob.coordinator.trajectories import Trajectories
from rljob.coordinator.trajectory import Trajectory
from rljob.coordinator.weight_publisher import TrainerSession, WeightPublisher
from rljob.ledger.queries import MixtureRecord, batch
from rljob.ledger.recorded_lengths import lengths_of_batch
from rljob.ledger.states import Kind, State
from rljob.ledger.step_metrics import step_metrics
from rljob.ledger.writer import LedgerWriter
from rljob.protocol import trainer_protocol as m
from rljob.protocol.batch_samples import BatchSample
from rljob.scheduling.groups import REJECTED, Ended, Group
from rljob.scheduling.mixture import Mixture
from rljob.scheduling.request import RequestKind
from rljob.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)

LOST_SECONDS = 2.0
"""Time for a disconnected engine to reconnect with the version under evaluation."""


class _FailRunOnError(AbstractContextManager[None]):
    """See :meth:`Run.fail_run_on_error`; entered for every frame of messages."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, Exception):
            return False
        # a defect: the state is unknown, so the run cannot continue
        log.error("the coordinator cannot continue", exc_info=error)
        self._run.fail("InternalError", f"the coordinator cannot continue: {error!r}; see its log")
        return True


class Run:
    """The state of one run. Implements trainer_control.TrainerRun and weight_publisher.PublisherRun.

    Args:
        spec: of the resolved manifest.
        ledger: of the run.
        clock: returns seconds; a simulation gives the time of its event loop.
    """

    def __init__(self, spec: RLJobSpec, ledger: LedgerWriter, clock: Callable[[], float] = time.monotonic) -> None:
        self.spec = spec
        self.ledger = ledger
        self.engines = Engines()
        self.silent = SilentEngines(self.engines)
        self.scheduler = Scheduler(scheduler_settings(spec), Mixture({task.name: task.weight for task in spec.tasks}))
        self.progress = RunHistory(clock)
        self.earlier = EarlierStepsHistory(spec.algorithm)
        self.lengths = AnswerLengths()
        self.trajectories = Trajectories(spec, ledger, self.engines, self.progress.events, self.changed)
        session = TrainerSession()
        self.weights = WeightPublisher(spec, ledger, self.engines, session, self)
        self.trainer = TrainerController(spec, ledger, session, self.weights, self)
        self.evaluations = Evaluations(spec, ledger, self.trajectories.add)
        self.draining = Draining(self.engines, self.trajectories, self.changed)
        self.outcomes = SampleOutcomes(self)
        self.decisions = GroupDecisions(self)
        self.loads = RoleLoads(self)
        self.held_out: Mapping[str, int] | None = None  # task → rows; from runners
        self.ends: Counter[str] = Counter()  # end → training samples, since the start of the run
        self.last_failure = ""  # reason of the last training sample that failed by itself
        self.failure: tuple[str, str] | None = None
        self.warnings: list[str] = []  # the newest, oldest first; the ledger has all
        self.earlier_warnings = 0  # number of those before them
        self.finished = False
        self.suspending = False
        self.suspended = False
        self.observed_generation = 0
        """metadata.generation of the RLJob whose spec was applied last; 0 outside a cluster."""
        self.ended = asyncio.Event()
        self.on_finished: Callable[[], None] = self.ended.set
        """Called once the end of the run is durable; must set ``ended``, on which the status depends."""
        self._advancing = False
        self._guard = _FailRunOnError(self)
        ledger.before_commit = self.advance
        self._tasks = {task.name: task for task in spec.tasks}

    # --- the core loop ---

    def changed(self) -> None:
        """Have :meth:`advance` called before the next commit: after the events of this iteration of the event loop, and
        those that arrive while a commit runs. What it sends would wait for that commit in any case."""
        if not self._advancing:
            self._advancing = True
            self.ledger.wake()

    def advance(self) -> None:
        """Take all steps that are possible in the current state, if it has changed."""
        if not self._advancing:
            return
        self._advancing = False
        with self._guard:
            if self.over:
                return
            self.silent.update(self.now)
            if not self.suspending:
                self._evaluate()
            self._form_batch_if_due()  # may reject groups and find stragglers: before admission and dispatch
            self.decisions.advance()
            if not self.suspending:
                self._admit()
                self.trajectories.dispatch(self._eligible, not self.scheduler.has_lead)
            self.trainer.advance()
            self._finish()
            self._suspend()
            self._update_timers()

    @property
    def over(self) -> bool:
        """Whether this process does no further work on the run."""
        return self.finished or self.suspended or self.failure is not None

    def fail_run_on_error(self) -> AbstractContextManager[None]:
        """Fail the run with a reason if the body raises, instead of leaving it stuck without one. What is returned may
        be entered again."""
        return self._guard

    def _evaluate(self) -> None:
        evaluations = self.evaluations
        if evaluations.running is None and evaluations.wanted(self.version) and self.held_out is not None:
            if not evaluations.dedicated or self.trainer.is_idle:  # else it advances before the version can be sent
                evaluations.start(self.version, self.held_out)
        elif evaluations.running is not None and self._pinned_is_lost(evaluations.running):
            asyncio.get_running_loop().call_later(LOST_SECONDS, self._drop_if_lost, evaluations.running)

    def _pinned_is_lost(self, version: int) -> bool:
        """Whether ``version`` is under evaluation, the trainer is at another one, evaluation engines are connected, and
        none of them serves ``version``."""
        if version != self.evaluations.running or version == self.version:
            return False
        evaluators = [engine for engine in self.engines.by_instance.values() if engine.evaluates]
        waiting = any(engine.connection is not None and engine.state != "starting" for engine in evaluators)
        return waiting and not any(engine.serving == (self.weights.lineage, version) for engine in evaluators)

    def _drop_if_lost(self, version: int) -> None:
        """Drop an evaluation, unless an engine with its version has reconnected."""
        with self.fail_run_on_error():
            if not self.over and self._pinned_is_lost(version):
                self.trajectories.drop(self.evaluations.drop())
                self.changed()

    def _admit(self) -> None:
        admissible = self.scheduler.admissible()
        if admissible:
            self._write_admission([self.scheduler.admit() for _ in range(admissible)])

    def _write_admission(self, groups: list[Group]) -> None:
        trajectories = []
        for group in groups:
            samples = [sample.id for sample in group.samples]
            self.ledger.admit_group(
                group.id, Kind.TRAIN, group.seq, group.task, group.row, self.version, samples, group.restarts
            )
            trajectories += [Trajectory(sample, group.task, group.row) for sample in group.samples]
        self._record_mixture()
        self.trajectories.add(trajectories)

    def _record_mixture(self) -> None:
        """Record what an event changed in the mixture's counters, in the event's commit: the tasks of later prompts do
        not depend on a restart."""
        if changed := self.scheduler.mixture.take_changed():
            self.ledger.record_mixture({task: MixtureRecord(**vars(share)) for task, share in changed.items()})

    def _eligible(self, engine: EngineRecord, kind: RequestKind) -> bool:
        """Whether ``engine`` may run requests of ``kind``: it has the purpose and the length, and serves the version.
        The ability of the engine decides it."""
        pinned, min_model_length = kind
        version = self.version if pinned is None else pinned
        if engine.serving != (self.weights.lineage, version):
            return False
        if not self._matches_purpose(engine, pinned is not None):
            return False
        if engine.max_model_length < min_model_length:
            return False
        return pinned is not None or self.scheduler.may_generate

    @property
    def now(self) -> float:
        """Time of the event loop in seconds."""
        return self._loop.time()

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()  # asks the system for the process id, on every call

    def _matches_purpose(self, engine: EngineRecord, evaluation: bool) -> bool:
        """Whether an engine runs requests of this purpose. Dedicated evaluation engines run all evaluation requests and
        nothing else."""
        return engine.evaluates == evaluation if self.evaluations.dedicated else not engine.evaluates

    def _form_batch_if_due(self) -> None:
        """Form the batch of the current version if the trainer is free and the scheduler has the groups. The trainer
        receives it from the ledger once it is durable."""
        if self.scheduler.lacks_groups or not self.trainer.awaits_new_batch:
            return
        formed = self.scheduler.form_batch()
        self.end_samples(formed.ended)
        if formed.replaced:
            self._write_admission([self.scheduler.restart(group) for group in formed.replaced])
        if formed.groups:
            samples = [s.id for group in formed.groups for s in group.samples if s.end is None]
            self.ledger.record_batch(self.version, samples)
            self.ledger.then(self.changed)

    def _update_timers(self) -> None:
        changed = self.engines.take_changed()
        self.progress.engines.update(changed, self.engines.by_instance, self.now)
        generating, updating = bool(self.engines.with_requests), bool(self.engines.in_update)
        session = self.trainer.session
        training, waiting = session.busy == "Train", session.connection is not None and not session.busy
        self.progress.watches.set_all(generating, training, updating, waiting)
        self.loads.update()

    def _finish(self) -> None:
        steps = self.spec.training.steps
        if self.version < steps:
            return
        saved = steps in self.trainer.checkpoints or steps == 0
        if self.evaluations.wanted(steps) or not saved:
            return
        self.end_samples(self.scheduler.finish())
        self.finished = True
        self.progress.end()
        self.ledger.record_finished()
        self.trainer.stop("the run is complete")
        self.ledger.then(self.on_finished)
        log.info("the run is complete: %d steps", steps)

    def suspend(self) -> None:
        """Suspend the run: the trainer finishes its current batch and writes a checkpoint. Open samples stay open.
        Idempotent."""
        if not self.suspending:
            log.info("suspending at version %d", self.version)
            self.suspending = True
            self.changed()

    def cancel_suspension(self) -> bool:
        """Cancel a suspension and continue; return False if it is too late: the trainer has its stop command.

        Safe at any time before that: during a suspension nothing is started or discarded, so continuing only means
        deriving the next command again.
        """
        if self.suspending and not self.over:
            log.info("suspension cancelled at version %d", self.version)
            self.suspending = False
            self.changed()
        return not self.suspended

    def _suspend(self) -> None:
        if not self.suspending or self.over or not self.trainer.is_quiescent:
            return
        self.suspended = True
        self.progress.end()
        self.trainer.stop("the run is suspended")
        self.ledger.then(self.on_finished)
        log.info("the run is suspended at version %d", self.version)

    # --- used by trainer control and weight publisher ---

    @property
    def version(self) -> int:
        """Trainer version: batches applied."""
        return self.scheduler.version

    def recorded_batch(self, step: int) -> m.Train | None:
        """Return the batch of ``step`` from the ledger; None while it is not durable."""
        if step == self.version and not self.is_formed(step):
            return None
        rows = batch(self.ledger, step)
        if not rows:
            return None
        samples, states = [], needs_states(self.spec.algorithm)
        for row in rows:
            sampling = self._tasks[row.task].sampling
            samples.append(
                BatchSample(
                    sample=row.sample,
                    group=row.group,
                    reward=row.reward,
                    prompt_tokens=row.prompt_tokens,
                    response_tokens=row.response_tokens,
                    total_tokens=row.total_tokens,
                    min_version=row.min_version,
                    temperature=sampling.temperature,
                    max_tokens=sampling.max_tokens,
                    sequences=[] if row.sequences is None else json.loads(row.sequences),
                    baseline=row.baseline,
                    turn_rewards=json.loads(row.turn_rewards) if states else [],
                    turn_states=json.loads(row.turn_states) if states and row.turn_states else [],
                    truncated=row.finish == "length",
                    task=row.task,
                )
            )
        return m.Train(
            self.trainer.session.incarnation,
            step,
            samples,
            check_initial_logprobs=step == 0,
            compare_logprobs=step > self.weights.before_trainer,
            earlier=self.earlier.before(step),
        )

    def is_formed(self, step: int) -> bool:
        """Whether the batch of ``step`` is formed and not applied."""
        return step in self.scheduler.batches

    def applied(self, step: int, metrics: dict[str, float]) -> None:
        """Record the first application of the batch of the current version."""
        timed = self.progress.time_step(step, self.trajectories.generated_tokens, self.weights.update_totals)
        # Before any write is queued: if it raises, the step is not partly recorded.
        measured = step_metrics(self.ledger.query, step, metrics, timed)
        for group in self.scheduler.batches[step]:
            self.lengths.train_group(len(group.scored), group.count_scored())
        self.end_samples(self.scheduler.trained(step))
        for tokens, samples in lengths_of_batch(self.ledger.query, step):
            self.lengths.train(tokens, samples)
        measured |= self._process_metrics() | self.lengths.metrics()
        self.ledger.record_step_metrics(step, measured)
        self.progress.add(step, measured)
        self.earlier.add(step, measured)

    def _process_metrics(self) -> dict[str, float]:
        """Return metrics of samples, engines and trainer at the end of a step."""
        return {
            **{f"queue/{name}": value for name, value in self.counts().items()},
            **{f"ended/{end}": self.ends[end] for end in REJECTED},
            "dispatch/members_at_home": self.trajectories.queue.members.share,
            "dispatch/turns_at_home": self.trajectories.queue.turns.share,
            "run/engines": len(self.engines.connected()),
            "run/lineage": self.weights.lineage,
            "run/incarnation": self.trainer.session.incarnation,
            "run/checkpoint": self.trainer.checkpoints.newest,
        }

    @property
    def must_hold_version(self) -> bool:
        """Whether the trainer must stay at its version: until its evaluation on shared engines is done, or until a
        dedicated evaluation engine serves it."""
        if not self.evaluations.wanted(self.version):
            return False
        pinned = self.evaluations.dedicated and self.evaluations.running == self.version
        return not (pinned and any(e.evaluates and e.serving == self._current for e in self.engines.connected()))

    def needs_weights(self, engine: EngineRecord) -> bool:
        """Whether an engine must receive the trainer's version."""
        if engine.serving == self._current or engine.state == "leaving" or self.draining.drained(engine):
            return False
        if engine.silent_seconds(self.now):
            return False
        if self.spec.weight_sync.in_flight == "wait" and self.trajectories.busy(engine):
            return False  # its update starts when its sequences have ended: they may take longer than an update may
        evaluated = self.evaluations.wanted(self.version)
        if engine.evaluates:
            return evaluated and self.evaluations.running in (None, self.version)
        return self.version < self.spec.training.steps or (evaluated and not self.evaluations.dedicated)

    @property
    def _current(self) -> tuple[int, int]:
        return (self.weights.lineage, self.version)

    def start_new_lineage(self) -> None:
        """Discard tokens of the previous lineage at α = 0 and in evaluations: they allow only weights that the trainer
        has."""
        for trajectory in list(self.trajectories.by_sample.values()):
            if self.spec.training.max_staleness == 0 or trajectory.version is not None:
                self.trajectories.start_over(trajectory)
        self.changed()

    def refuse_start(self, reason: str) -> None:
        """Handle weights that differ from the published ones although the trainer has just loaded them."""
        self.trainer.refuse_start(reason)

    def warn(self, message: str) -> None:
        """Record a sentence that readers of the run must see; it stays in the status. A repeated one is only logged:
        each trainer process reports a damaged checkpoint until it is replaced."""
        log.warning("%s", message)
        if message not in self.warnings:
            self.warnings.append(message)
            if len(self.warnings) > MOST_WARNINGS:
                del self.warnings[0]
                self.earlier_warnings += 1
            self.ledger.record_warning(message)

    def fail(self, reason: str, message: str) -> None:
        """End the run as failed; it is not restarted."""
        if not self.over:
            log.error("the run failed (%s): %s", reason, message)
            self.failure = (reason, message)
            self.progress.end()
            self.trainer.stop("the run failed")
            self.ledger.then(self.on_finished)

    def end_samples(self, ended: list[Ended]) -> None:
        """Record samples that the scheduler ended with an event (possibly none), and stop the work on them."""
        self._record_mixture()
        if not ended:
            return
        self.outcomes.warn_of_rejections(ended)
        self.progress.events.ended(ended)
        cut = [e.sample for e in ended if e.sample.reward is None and not e.sample.greedy]
        self.lengths.cut(sum(sample.group.dispatched is not None for sample in cut))
        for (end, reason), entries in groupby(ended, key=lambda entry: (entry.end, entry.reason)):
            samples = [entry.sample.id for entry in entries]
            self.ledger.end_samples(samples, State(end), reason)
            self.ends[end] += len(samples)
        self.trajectories.drop([entry.sample.id for entry in ended])

    def counts(self) -> dict[str, Any]:
        """Return state → number of samples or groups."""
        complete = sum(group.complete for group in self.scheduler.groups.values())
        return {
            **self.trajectories.counts(),
            "groups_open": len(self.scheduler.groups) - complete,
            "groups_complete": complete,
            "evaluating": self.evaluations.remaining,
        }
