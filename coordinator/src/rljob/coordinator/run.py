"""One run: scheduler, trajectories, policy and evaluations, wired together.

Every event changes state at once, queues what must be written, and asks for :meth:`Run.advance`, which looks at what
is and takes the next steps. Effects on the outside wait for the ledger (see store).
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rljob.api.models import RLJobSpec
from rljob.coordinator.engines import Engine, Engines
from rljob.coordinator.evaluations import Evaluations
from rljob.coordinator.history import History
from rljob.coordinator.peers import Peer
from rljob.coordinator.policy import Policy
from rljob.coordinator.store import Store, now
from rljob.coordinator.trajectories import Trajectories
from rljob.coordinator.trajectory import Trajectory
from rljob.protocol import messages as m
from rljob.scheduling.dispatch import EngineLoad, Request
from rljob.scheduling.filters import FILTERS
from rljob.scheduling.groups import Ended, Group
from rljob.scheduling.mixture import Mixture
from rljob.scheduling.scheduler import Scheduler, Settings

log = logging.getLogger(__name__)

HOPELESS_BATCHES = 50
"""Rejected groups in a row, in batches, after which the run ends: nothing is learned any more."""


MAX_RETURNS = 8
"""How often engines may give a sample's request back undone before it counts as failed."""


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
    """The state of one run. Implements policy.RunView."""

    def __init__(self, spec: RLJobSpec, store: Store) -> None:
        self.spec = spec
        self.store = store
        self.engines = Engines()
        self.scheduler = Scheduler(settings_of(spec), Mixture({task.name: task.weight for task in spec.tasks}))
        self.trajectories = Trajectories(spec, store, self.engines, self.changed)
        self.policy = Policy(spec, store, self.engines, self)
        self.evaluations = Evaluations(spec, store, self.trajectories.add)
        self.history = History()
        self.failure: tuple[str, str] | None = None
        self.finished = False
        self.ended = asyncio.Event()
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
        with self.guarded():
            if self.finished or self.failure is not None:
                return
            self._evaluate()
            self._admit()
            self.trajectories.dispatch(self._eligible)
            self.policy.advance()
            self._finish()
            self._watch()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Inside, an error of ours ends the run with a reason, rather than leaving it standing still."""
        try:
            yield
        except Exception as error:  # a defect: nothing is known about what it left undone
            log.exception("the coordinator cannot go on")
            self.fail("InternalError", f"the coordinator cannot go on: {error!r}; see its log")

    def _evaluate(self) -> None:
        if self.evaluations.running is None and self.evaluations.wanted(self.version):
            self.evaluations.start(self.version)

    def _admit(self) -> None:
        started = [self.scheduler.admit() for _ in range(self.scheduler.admissible())]
        if started:
            self._write_admission(started)

    def _write_admission(self, groups: list[Group]) -> None:
        trajectories = []
        for group in groups:
            self.store.execute(
                "INSERT INTO groups VALUES (?,?,?,?,?,?)",
                group.id, "train", group.seq, group.task, group.row, self.version,
            )  # fmt: skip
            for sample in group.samples:
                self.store.execute(
                    "INSERT INTO samples (id, group_id, member) VALUES (?,?,?)", sample.id, group.id, sample.member
                )
                trajectories.append(Trajectory(sample, group.task, group.row))
        self.trajectories.add(trajectories)

    def _eligible(self, load: EngineLoad, request: Request) -> bool:
        """An engine behind the current version gets no new work; one without acknowledged weights none at all."""
        engine = self.engines.by_instance[load.instance]
        if request.version is None and not self.scheduler.may_generate:
            return False
        version = self.version if request.version is None else request.version
        return engine.serving == (self.policy.lineage, version)

    def _watch(self) -> None:
        watches, engines = self.history.watches, self.engines.by_instance.values()
        watches.set("generating", any(engine.load.requests for engine in engines))
        watches.set("updating_weights", any(engine.update is not None for engine in engines))
        watches.set("training", self.policy.busy == "Train")
        watches.set("trainer_waiting", self.policy.trainer is not None and not self.policy.busy)

    def _finish(self) -> None:
        steps = self.spec.training.steps
        if self.version < steps or self.evaluations.wanted(steps) or steps not in self.policy.checkpoints:
            return
        self._write_ended(self.scheduler.finish())
        self.finished = True
        self.store.execute("INSERT OR REPLACE INTO meta VALUES ('finished', ?)", str(now()))
        self.policy.stop("the run is complete")
        self.store.then(self.ended.set)
        log.info("the run is complete: %d steps", steps)

    # --- what the policy asks ---

    @property
    def version(self) -> int:
        """Trainer version: batches applied."""
        return self.scheduler.version

    def batch(self, step: int) -> m.Train | None:
        """Return the batch of ``step``: as recorded, or formed now if it is time."""
        if step == self.version and step not in self.scheduler.batches:
            formed = self.scheduler.form_batch()
            self._write_ended(formed.ended)
            if formed.again:
                self._write_admission([self.scheduler.restart(task, row) for task, row in formed.again])
            if not formed.groups:
                return None
            samples = [s.id for group in formed.groups for s in group.samples if s.end is None]
            self.store.execute("INSERT INTO batches VALUES (?,?,?)", step, json.dumps(samples), now())
            for sample in samples:
                self.store.execute("UPDATE samples SET state = 'batched', step = ? WHERE id = ?", step, sample)
            self.store.then(self.changed)
            return None  # served from the ledger as soon as it is durable
        return self._recorded_batch(step)

    def _recorded_batch(self, step: int) -> m.Train | None:
        rows = self.store.query(
            "SELECT s.id, s.group_id, s.reward, s.prompt_tokens, s.response_tokens, s.min_version, g.task"
            " FROM samples s JOIN groups g ON g.id = s.group_id WHERE s.step = ? ORDER BY g.seq, s.member",
            step,
        )
        if not rows:
            return None
        samples = []
        for row in rows:
            sampling = self._tasks[row["task"]].sampling
            samples.append(
                m.BatchSample(
                    sample=row["id"],
                    group=row["group_id"],
                    reward=row["reward"],
                    prompt_tokens=row["prompt_tokens"],
                    response_tokens=row["response_tokens"],
                    min_version=row["min_version"],
                    temperature=sampling.temperature,
                    max_tokens=sampling.max_tokens,
                )
            )
        return m.Train(self.policy.incarnation, step, samples, first_of_run=step == 0)

    def applied(self, step: int, metrics: dict[str, float]) -> None:
        """The batch of the current version was applied for the first time."""
        groups = self.scheduler.batches[step]
        self.history.add(step, groups, metrics, self.trajectories.generated_tokens)
        self._write_ended(self.scheduler.trained(step))

    def evaluation_wanted(self, version: int) -> bool:
        """Whether ``version`` must be, or is being, evaluated."""
        return self.evaluations.wanted(version)

    def new_lineage(self) -> None:
        """At α = 0, and in evaluations, nothing may come of weights that the trainer does not have."""
        for trajectory in list(self.trajectories.by_sample.values()):
            if self.spec.training.max_staleness == 0 or trajectory.version is not None:
                self.trajectories.start_over(trajectory)
        self.changed()

    def fail(self, reason: str, message: str) -> None:
        """End the run: it cannot go on, whatever is restarted."""
        if self.failure is None and not self.finished:
            log.error("the run failed (%s): %s", reason, message)
            self.failure = (reason, message)
            self.policy.stop("the run failed")
            self.store.then(self.ended.set)

    # --- events from runners ---

    def scored(self, peer: Peer, message: m.Scored) -> None:
        """A trajectory ended with a reward; repetitions are acknowledged."""
        trajectory = self.trajectories.by_sample.get(message.sample)
        if trajectory is not None and not trajectory.generated:
            self.trajectories.take_back(trajectory, peer)  # it is about an answer that was thrown away
            return
        if trajectory is not None and not math.isfinite(message.reward):
            self.trajectory_failed(peer, m.TrajectoryFailed(message.sample, f"its reward is {message.reward}"))
            return
        if trajectory is not None:
            self.trajectories.done(message.sample)
            self.store.execute(
                "UPDATE samples SET state = 'scored', reward = ?, metrics = ?, text = ? WHERE id = ?",
                message.reward, json.dumps(message.metrics), message.text, message.sample,
            )  # fmt: skip
            if trajectory.version is not None:
                self.store.execute("UPDATE samples SET state = 'evaluated' WHERE id = ?", message.sample)
                self.evaluations.take(trajectory.sample, message.reward)
            else:
                self._write_ended(self.scheduler.score(trajectory.sample, message.reward))
                self._check_hope()
            self.changed()
        self.store.then(lambda: peer.send(m.AckScored([message.sample])))

    def trajectory_failed(self, peer: Peer | None, message: m.TrajectoryFailed) -> None:
        """A trajectory cannot be finished: recorded, its group replaced."""
        trajectory = self.trajectories.by_sample.get(message.sample)
        if trajectory is not None:
            log.warning("sample %s failed: %s", message.sample, message.reason)
            self.trajectories.done(message.sample)
            if trajectory.version is not None:
                self.store.execute(
                    "UPDATE samples SET state = 'failed', reason = ? WHERE id = ?", message.reason, message.sample
                )
                self.evaluations.take(trajectory.sample, None)
            else:
                self._write_ended(self.scheduler.fail(trajectory.sample, message.reason))
                self._check_hope(message.reason)
            self.changed()
        if peer is not None:
            self.store.then(lambda: peer.send(m.AckScored([message.sample])))

    def _check_hope(self, reason: str = "") -> None:
        batch = self.spec.training.prompts_per_step
        if self.scheduler.failures_in_a_row > max(3, 2 * batch):
            self.fail("SamplesFail", f"no sample could be finished any more; the last failed because: {reason}")
        if self.scheduler.rejections_in_a_row > HOPELESS_BATCHES * batch:
            self.fail(
                "GroupsRejected",
                f"algorithm.groupFilter rejected {self.scheduler.rejections_in_a_row} groups in a row: all rewards of "
                "each were equal; make the task easier or harder, or check the reward",
            )

    def _write_ended(self, ended: list[Ended]) -> None:
        for entry in ended:
            self.store.execute(
                "UPDATE samples SET state = ?, reason = ? WHERE id = ?", entry.end, entry.reason, entry.sample.id
            )
        self.trajectories.drop(entry.sample.id for entry in ended)

    # --- engines come and go ---

    def register_engine(self, peer: Peer, message: m.RegisterEngine) -> None:
        """An agent (again) offers its engine."""
        before = self.engines.of_peer(peer)
        if before is not None and before.instance != message.instance:
            self.forget_engine(before)
        engine = self.engines.by_instance.get(message.instance)
        if engine is None:
            load = EngineLoad(message.instance, message.max_concurrency)
            engine = Engine(message.instance, message.pool, peer, load)
            self.engines.by_instance[message.instance] = engine
        engine.peer, engine.state = peer, "ready"
        holds = (message.lineage, message.version)
        known = message.version >= 0 and self.policy.digests.get(holds) == message.digest
        engine.serving = holds if known else None
        engine.end_update()
        self.trajectories.register_engine(engine, message.running)
        self.changed()

    def suspend_engine(self, engine: Engine) -> None:
        """Its server is gone and another is starting: what it had goes to others now."""
        engine.serving = None
        self.policy.lose_engine(engine)
        self.trajectories.lose_engine(engine)
        self.changed()

    def forget_engine(self, engine: Engine) -> None:
        """An engine will not come back: what it had goes to others."""
        if self.engines.by_instance.pop(engine.instance, None) is not None:
            self.policy.lose_engine(engine)
            self.trajectories.lose_engine(engine)
            self.changed()

    def generation_failed(self, engine: Engine, message: m.GenerationFailed) -> None:
        """A request came back undone."""
        key = (message.part.sample, message.part.turn, message.part.attempt)
        if key not in engine.load.requests:
            return  # about a request that is no longer its own
        if message.permanent:
            self.trajectory_failed(None, m.TrajectoryFailed(message.part.sample, message.reason))
        elif self.trajectories.returned(engine, message.part) > MAX_RETURNS:
            reason = f"engines gave it back {MAX_RETURNS} times, the last time because: {message.reason}"
            self.trajectory_failed(None, m.TrajectoryFailed(message.part.sample, reason))

    def counts(self) -> dict[str, Any]:
        """Return how many samples and groups are where."""
        complete = sum(group.complete for group in self.scheduler.groups.values())
        return {
            **self.trajectories.counts(),
            "groups_open": len(self.scheduler.groups) - complete,
            "groups_complete": complete,
            "evaluating": self.evaluations.remaining,
        }
