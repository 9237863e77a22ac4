"""What runners and engines tell, taken into the run: samples that end, parts that come and go.

The trainer's messages are taken by the policy.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from rljob.coordinator.engines import Engine
from rljob.coordinator.peers import Peer
from rljob.coordinator.trajectory import Trajectory
from rljob.ledger.states import Kind, State
from rljob.protocol import messages as m
from rljob.scheduling.dispatch import EngineLoad

if TYPE_CHECKING:
    from rljob.coordinator.run import Run

log = logging.getLogger(__name__)

HOPELESS_BATCHES = 50
"""Rejected groups in a row, in batches, after which the run ends: nothing is learned any more."""
MAX_RETURNS = 8
"""How often engines may give a sample's request back undone before it counts as failed."""


class Events:
    """Takes events into one run."""

    def __init__(self, run: Run) -> None:
        self._run = run

    # --- runners ---

    def scored(self, peer: Peer, message: m.Scored) -> None:
        """A trajectory ended with a reward; repetitions are acknowledged."""
        run = self._run
        trajectory = run.trajectories.current(message.sample, message.attempt, peer)
        if trajectory is not None and not math.isfinite(message.reward):
            self._give_up(trajectory, f"its reward is {message.reward}")
            trajectory = None
        if trajectory is not None:
            run.trajectories.done(message.sample)
            run.ledger.record_score(message.sample, trajectory.kind, message.reward, message.metrics, message.text)
            if trajectory.kind is Kind.EVALUATION:
                run.evaluations.take(trajectory.sample, message.reward)
            else:
                run.write_ended(run.scheduler.score(trajectory.sample, message.reward))
                self._check_hope()
            run.changed()
        run.ledger.then(lambda: peer.send(m.AckScored([message.sample])))

    def register_runner(self, peer: Peer, message: m.RegisterRunner) -> None:
        """A runner (again) takes leases."""
        run = self._run
        run.held_out = message.held_out
        for task in (run.spec.evaluation.tasks or []) if run.spec.evaluation is not None else []:
            if message.held_out.get(task) == 0:
                run.fail("NoHeldOutRows", f"task {task} has no held-out rows to evaluate; hold some out in its data")
        run.trajectories.register_runner(peer, message.capacity, message.driving)
        run.changed()

    def trajectory_failed(self, peer: Peer, message: m.TrajectoryFailed) -> None:
        """A runner cannot finish a trajectory."""
        run = self._run
        trajectory = run.trajectories.current(message.sample, message.attempt, peer)
        if trajectory is not None:
            self._give_up(trajectory, message.reason)
        run.ledger.then(lambda: peer.send(m.AckScored([message.sample])))

    def _give_up(self, trajectory: Trajectory, reason: str) -> None:
        """Record that a sample cannot be finished; its group is replaced."""
        run = self._run
        sample = trajectory.sample
        log.warning("sample %s failed: %s", sample.id, reason)
        run.trajectories.drop([sample.id])
        if trajectory.kind is Kind.EVALUATION:
            run.ledger.end_sample(sample.id, State.FAILED, reason)
            run.evaluations.take(sample, None)
        else:
            run.write_ended(run.scheduler.fail(sample, reason))
            self._check_hope(reason)
        run.changed()

    def _check_hope(self, reason: str = "") -> None:
        run = self._run
        batch = run.spec.training.prompts_per_step
        if run.scheduler.failures_in_a_row > max(3, 2 * batch):
            run.fail("SamplesFail", f"no sample could be finished any more; the last failed because: {reason}")
        if run.scheduler.rejections_in_a_row > HOPELESS_BATCHES * batch:
            run.fail(
                "GroupsRejected",
                f"algorithm.groupFilter rejected {run.scheduler.rejections_in_a_row} groups in a row: all rewards of "
                "each were equal; make the task easier or harder, or check the reward",
            )

    # --- engines come and go ---

    def register_engine(self, peer: Peer, message: m.RegisterEngine) -> None:
        """An agent (again) offers its engine."""
        run = self._run
        before = run.engines.of_peer(peer)
        if before is not None and before.instance != message.instance:
            self.forget_engine(before)
        engine = run.engines.by_instance.get(message.instance)
        if engine is None:
            load = EngineLoad(message.instance, message.max_concurrency, message.max_model_length)
            purpose = next(pool.purpose for pool in run.spec.rollouts if pool.name == message.pool)
            engine = Engine(message.instance, message.pool, peer, load, message.pod, purpose == "evaluation")
            run.engines.by_instance[message.instance] = engine
        engine.peer, engine.state = peer, "ready"
        holds = (message.lineage, message.version)
        known = message.version >= 0 and run.policy.digests.get(holds) == message.digest
        engine.serving = holds if known else None
        engine.end_update()
        run.trajectories.register_engine(engine, message.running)
        run.changed()

    def suspend_engine(self, engine: Engine) -> None:
        """Its server is gone and another is starting: what it had goes to others now."""
        run = self._run
        engine.serving = None
        run.policy.lose_engine(engine)
        run.trajectories.lose_engine(engine)
        run.changed()

    def forget_engine(self, engine: Engine) -> None:
        """An engine will not come back: what it had goes to others. It may have come back as another already."""
        run = self._run
        if run.engines.by_instance.get(engine.instance) is engine:
            del run.engines.by_instance[engine.instance]
            run.policy.lose_engine(engine)
            run.trajectories.lose_engine(engine)
            run.changed()

    def generation_failed(self, engine: Engine, message: m.GenerationFailed) -> None:
        """A request came back undone."""
        run = self._run
        key = (message.part.sample, message.part.turn, message.part.attempt)
        if key not in engine.load.requests:
            return  # about a request that is no longer its own
        if message.permanent:
            self._give_up(run.trajectories.by_sample[message.part.sample], message.reason)
        elif run.trajectories.returned(engine, message.part) > MAX_RETURNS:
            reason = f"engines gave it back {MAX_RETURNS} times, the last time because: {message.reason}"
            self._give_up(run.trajectories.by_sample[message.part.sample], reason)
