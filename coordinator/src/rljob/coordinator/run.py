"""One run: scheduler, trajectories, trainer, weights and evaluations, wired together.

Every event changes state at once, queues what must be written, and asks for :meth:`Run.advance`, which takes the next
steps from current state. Effects on the outside wait for the ledger (see :class:`rljob.ledger.store.Store`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rljob.api.models import RLJobSpec
from rljob.coordinator.draining import Draining
from rljob.coordinator.engines import EngineRecord, Engines
from rljob.coordinator.evaluations import Evaluations
from rljob.coordinator.progress import RunHistory
from rljob.coordinator.sample_outcomes import SampleOutcomes
from rljob.coordinator.trainer_control import TrainerController
from rljob.coordinator.trajectories import Trajectories
from rljob.coordinator.trajectory import Trajectory
from rljob.coordinator.weight_publisher import TrainerSession, WeightPublisher
from rljob.ledger.queries import batch
from rljob.ledger.states import Kind, State
from rljob.ledger.step_metrics import step_metrics
from rljob.ledger.writer import LedgerWriter
from rljob.protocol import messages as m
from rljob.scheduling.dispatch import Request
from rljob.scheduling.filters import FILTERS
from rljob.scheduling.groups import REJECTED, Ended, Group
from rljob.scheduling.mixture import Mixture
from rljob.scheduling.scheduler import Scheduler, Settings

log = logging.getLogger(__name__)

LOST_SECONDS = 2.0
"""How long an engine whose connection broke may come back with the version that is being evaluated."""


def settings_of(spec: RLJobSpec) -> Settings:
    """Return what the manifest says about scheduling."""
    return Settings(
        steps=spec.training.steps,
        groups_per_batch=spec.training.prompts_per_step,
        samples_per_group=spec.training.samples_per_prompt,
        max_staleness=spec.training.max_staleness,
        redundant_groups=spec.scheduling.redundancy.groups,
        redundant_members=spec.scheduling.redundancy.members,
        regenerate=spec.scheduling.on_deadline == "regenerate",
        accept=FILTERS[spec.algorithm.group_filter or "none"],
    )


class Run:
    """The state of one run. Implements trainer_control.TrainerRun and weight_publisher.PublisherRun."""

    def __init__(self, spec: RLJobSpec, ledger: LedgerWriter) -> None:
        self.spec = spec
        self.ledger = ledger
        self.engines = Engines()
        self.scheduler = Scheduler(settings_of(spec), Mixture({task.name: task.weight for task in spec.tasks}))
        self.trajectories = Trajectories(spec, ledger, self.engines, self.changed)
        session = TrainerSession()
        self.weights = WeightPublisher(spec, ledger, self.engines, session, self)
        self.trainer = TrainerController(spec, ledger, session, self.weights, self)
        self.evaluations = Evaluations(spec, ledger, self.trajectories.add)
        self.draining = Draining(self.engines, self.trajectories, self.changed)
        self.outcomes = SampleOutcomes(self)
        self.progress = RunHistory()
        self.held_out: Mapping[str, int] | None = None  # task → rows; from runners
        self.ends: Counter[str] = Counter()  # end → samples of training, since the run began
        self.failure: tuple[str, str] | None = None
        self.finished = False
        self.suspending = False
        self.suspended = False
        self.observed_generation = 0
        """Of the RLJob: the spec that was acted on last; 0 outside a cluster."""
        self.ended = asyncio.Event()
        self.on_finished: Callable[[], None] = self.ended.set
        """Called once the end is durable; sets ``ended``, which the status waits for."""
        self._advancing = False
        self._tasks = {task.name: task for task in spec.tasks}

    # --- the core loop ---

    def changed(self) -> None:
        """Ask for :meth:`advance` once the events of this turn of the loop are in."""
        if not self._advancing:
            self._advancing = True
            asyncio.get_running_loop().call_soon(self.advance)

    def advance(self) -> None:
        """Take every step that can be taken now."""
        self._advancing = False
        with self.fail_run_on_error():
            if self.over:
                return
            if not self.suspending:
                self._evaluate()
                self._admit()
                self.trajectories.dispatch(self._eligible)
            self._form_batch_if_due()
            self.trainer.advance()
            self._finish()
            self._suspend()
            self._watch()

    @property
    def over(self) -> bool:
        """Whether nothing more will be done by this process."""
        return self.finished or self.suspended or self.failure is not None

    @contextmanager
    def fail_run_on_error(self) -> Iterator[None]:
        """Inside, a defect ends the run with a reason instead of stopping it without one."""
        try:
            yield
        except Exception as error:  # a defect: nothing is known about what it left undone
            log.exception("the coordinator cannot continue")
            self.fail("InternalError", f"the coordinator cannot continue: {error!r}; see its log")

    def _evaluate(self) -> None:
        evaluations = self.evaluations
        if evaluations.running is None and evaluations.wanted(self.version) and self.held_out is not None:
            if not evaluations.dedicated or self.trainer.is_idle:  # else it moves on before the version can be sent
                evaluations.start(self.version, self.held_out)
        elif evaluations.running is not None and self._pinned_is_lost(evaluations.running):
            asyncio.get_running_loop().call_later(LOST_SECONDS, self._drop_if_lost, evaluations.running)

    def _pinned_is_lost(self, version: int) -> bool:
        """Whether engines wait for the end of an evaluation of ``version``, and no engine serves that version."""
        if version != self.evaluations.running or version == self.version:
            return False
        evaluators = [engine for engine in self.engines.by_instance.values() if engine.evaluates]
        waiting = any(engine.connection is not None and engine.state != "starting" for engine in evaluators)
        return waiting and not any(engine.serving == (self.weights.lineage, version) for engine in evaluators)

    def _drop_if_lost(self, version: int) -> None:
        """Give an evaluation up, unless an engine with its version came back meanwhile."""
        with self.fail_run_on_error():
            if not self.over and self._pinned_is_lost(version):
                self.trajectories.drop(self.evaluations.drop())
                self.changed()

    def _admit(self) -> None:
        started = [self.scheduler.admit() for _ in range(self.scheduler.admissible())]
        if started:
            self._write_admission(started)

    def _write_admission(self, groups: list[Group]) -> None:
        trajectories = []
        for group in groups:
            samples = [sample.id for sample in group.samples]
            self.ledger.admit_group(group.id, Kind.TRAIN, group.seq, group.task, group.row, self.version, samples)
            trajectories += [Trajectory(sample, group.task, group.row) for sample in group.samples]
        self.trajectories.add(trajectories)

    def _eligible(self, engine: EngineRecord, request: Request) -> bool:
        """An engine behind the current version gets no new work; one without acknowledged weights none at all."""
        if engine.max_model_length < request.shortest or not self._does(engine, request.version is not None):
            return False
        if engine.state == "leaving" or self.draining.drains(engine):
            return False
        if request.version is None and not self.scheduler.may_generate:
            return False
        version = self.version if request.version is None else request.version
        return engine.serving == (self.weights.lineage, version)

    def _does(self, engine: EngineRecord, evaluation: bool) -> bool:
        """Whether an engine does this sort of work: those of evaluation pools nothing but evaluation, which is theirs
        alone."""
        return engine.evaluates == evaluation if self.evaluations.dedicated else not engine.evaluates

    def _form_batch_if_due(self) -> None:
        """Form the batch of the current version if the trainer is free for it and the scheduler has it. The trainer is
        served it from the ledger, once it is durable."""
        if not self.trainer.awaits_new_batch:
            return
        formed = self.scheduler.form_batch()
        self.end_samples(formed.ended)
        if formed.again:
            self._write_admission([self.scheduler.restart(task, row) for task, row in formed.again])
        if formed.groups:
            samples = [s.id for group in formed.groups for s in group.samples if s.end is None]
            self.ledger.record_batch(self.version, samples)
            self.ledger.then(self.changed)

    def _watch(self) -> None:
        watches, engines = self.progress.watches, self.engines.by_instance.values()
        watches.set("generating", any(engine.requests for engine in engines))
        watches.set("updating_weights", any(engine.update is not None for engine in engines))
        session = self.trainer.session
        watches.set("training", session.busy == "Train")
        watches.set("trainer_waiting", session.connection is not None and not session.busy)

    def _finish(self) -> None:
        steps = self.spec.training.steps
        saved = steps in self.trainer.checkpoints or steps == 0
        if self.version < steps or self.evaluations.wanted(steps) or not saved:
            return
        self.end_samples(self.scheduler.finish())
        self.finished = True
        self.progress.end()
        self.ledger.record_finished()
        self.trainer.stop("the run is complete")
        self.ledger.then(self.on_finished)
        log.info("the run is complete: %d steps", steps)

    def suspend(self) -> None:
        """Suspend the run: the trainer finishes the batch under way and writes a checkpoint. Open samples stay as they
        are. Idempotent."""
        if not self.suspending:
            log.info("suspending at version %d", self.version)
            self.suspending = True
            self.changed()

    def take_suspension_back(self) -> bool:
        """Continue after all; return False when it is too late: the end is decided, and the trainer was told to stop.

        Safe at any moment before: while a run is being suspended nothing is started and nothing is discarded, so that
        continuing only means choosing the next command again.
        """
        if self.suspending and not self.over:
            log.info("not suspending after all, at version %d", self.version)
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

    # --- what trainer and publisher need ---

    @property
    def version(self) -> int:
        """Trainer version: batches applied."""
        return self.scheduler.version

    def recorded_batch(self, step: int) -> m.Train | None:
        """Return the batch of ``step`` as the ledger has it; None while it is not durable there."""
        if step == self.version and not self.is_formed(step):
            return None
        rows = batch(self.ledger, step)
        if not rows:
            return None
        samples = []
        for row in rows:
            sampling = self._tasks[row.task].sampling
            samples.append(
                m.BatchSample(
                    sample=row.sample,
                    group=row.group,
                    reward=row.reward,
                    prompt_tokens=row.prompt_tokens,
                    response_tokens=row.response_tokens,
                    total_tokens=row.total_tokens,
                    min_version=row.min_version,
                    temperature=sampling.temperature,
                    max_tokens=sampling.max_tokens,
                )
            )
        return m.Train(self.trainer.session.incarnation, step, samples, check_initial_logprobs=step == 0)

    def is_formed(self, step: int) -> bool:
        """Whether the batch of ``step`` is formed and not applied."""
        return step in self.scheduler.batches

    def applied(self, step: int, metrics: dict[str, float]) -> None:
        """The batch of the current version was applied for the first time."""
        timed = self.progress.time_step(step, self.trajectories.generated_tokens, self.weights.seconds_in_updates)
        # Before anything is queued for the ledger: if it raises, the step is not half recorded.
        measured = step_metrics(self.ledger.query, step, metrics, timed)
        self.end_samples(self.scheduler.trained(step))
        measured |= self._process_metrics()
        self.ledger.record_step_metrics(step, measured)
        self.progress.add(step, measured)

    def _process_metrics(self) -> dict[str, float]:
        """Return where samples, engines and trainer are, as a step was just applied."""
        return {
            **{f"queue/{name}": value for name, value in self.counts().items()},
            **{f"ended/{end}": self.ends[end] for end in REJECTED},
            "run/engines": len(self.engines.connected()),
            "run/lineage": self.weights.lineage,
            "run/incarnation": self.trainer.session.incarnation,
            "run/checkpoint": self.trainer.checkpoints[-1] if self.trainer.checkpoints else 0,
        }

    @property
    def must_hold_version(self) -> bool:
        """Whether the trainer must stay at its version: as long as it is evaluated on the engines of training, or until
        an engine of those for evaluation has it."""
        if not self.evaluations.wanted(self.version):
            return False
        pinned = self.evaluations.dedicated and self.evaluations.running == self.version
        return not (pinned and any(e.evaluates and e.serving == self._current for e in self.engines.connected()))

    def needs_weights(self, engine: EngineRecord) -> bool:
        """Whether an engine is to be given the trainer's version."""
        if engine.serving == self._current or engine.state == "leaving" or self.draining.drained(engine):
            return False
        evaluated = self.evaluations.wanted(self.version)
        if engine.evaluates:
            return evaluated and self.evaluations.running in (None, self.version)
        return self.version < self.spec.training.steps or (evaluated and not self.evaluations.dedicated)

    @property
    def _current(self) -> tuple[int, int]:
        return (self.weights.lineage, self.version)

    def start_new_lineage(self) -> None:
        """At α = 0, and in evaluations, nothing may come of weights that the trainer does not have."""
        for trajectory in list(self.trajectories.by_sample.values()):
            if self.spec.training.max_staleness == 0 or trajectory.version is not None:
                self.trajectories.start_over(trajectory)
        self.changed()

    def fail(self, reason: str, message: str) -> None:
        """End the run as failed: no restart can help."""
        if not self.over:
            log.error("the run failed (%s): %s", reason, message)
            self.failure = (reason, message)
            self.progress.end()
            self.trainer.stop("the run failed")
            self.ledger.then(self.on_finished)

    def end_samples(self, ended: list[Ended]) -> None:
        """Record samples that the scheduler ended, and stop the work on them."""
        for entry in ended:
            self.ledger.end_sample(entry.sample.id, State(entry.end), entry.reason)
            self.ends[entry.end] += 1
        self.trajectories.drop(entry.sample.id for entry in ended)

    def counts(self) -> dict[str, Any]:
        """Return how many samples and groups are where."""
        complete = sum(group.complete for group in self.scheduler.groups.values())
        return {
            **self.trajectories.counts(),
            "groups_open": len(self.scheduler.groups) - complete,
            "groups_complete": complete,
            "evaluating": self.evaluations.remaining,
        }
