"""Ends samples with or without a reward, and fails a run that cannot make progress."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rljob.api.text_escape import escape_line, short_line
from rljob.coordinator.trajectory import Trajectory
from rljob.ledger.states import Kind, State
from rljob.protocol import runner_protocol as m
from rljob.scheduling.groups import Cause, Group
from rljob.scheduling.mixture import HOPELESS

if TYPE_CHECKING:
    from rljob.coordinator.run import Run

log = logging.getLogger(__name__)

TOO_MANY_FAILED = "TooManyFailedSamples"
"""Reason of a failed run whose message has the reason of its last failed sample."""
LAST_FAILURE_CHARACTERS = 500
"""Of that reason; `rljob samples --state failed` has all of it."""
MAX_REJECTED_BATCHES = 50
"""Limit of consecutive rejected groups, in batches. Beyond it the run fails: it no longer learns."""


class SampleOutcomes:
    """Applies the outcomes of samples to the scheduler, evaluations and ledger of one run."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def scored(self, trajectory: Trajectory, turn_rewards: list[float], message: m.TrajectoryScored) -> None:
        """Record the reward of a sample as its runner sent it, and the rewards of its turns."""
        run, sample, reward = self._run, trajectory.sample, message.reward
        if trajectory.kind is Kind.TRAIN and not sample.greedy:
            run.lengths.score(trajectory.written, sample.group.count_scored())
        run.trajectories.done(sample.id)
        for role, logprobs in message.logprobs.items():
            run.ledger.record_logprobs(sample.id, role, logprobs)
        run.ledger.record_score(
            sample.id,
            trajectory.kind,
            reward,
            turn_rewards,
            message.metrics,
            message.text,
            message.branch,
            message.states,
        )
        if trajectory.kind is Kind.EVALUATION:
            run.evaluations.take(sample, reward)
        else:
            run.end_samples(run.scheduler.score(sample, reward))
            self._check_progress(sample.group)
        run.changed()

    def failed(self, trajectory: Trajectory, reason: str, cause: Cause) -> None:
        """End a sample that cannot be finished; its group is replaced."""
        run, sample = self._run, trajectory.sample
        log.warning("sample %s failed: %s", sample.id, escape_line(reason))
        run.trajectories.drop([sample.id])
        run.ledger.record_failure(sample.id)
        if trajectory.kind is Kind.EVALUATION:
            run.ledger.end_samples([sample.id], State.FAILED, reason)
            run.evaluations.take(sample, None, reason)
        else:
            run.last_failure = reason
            run.end_samples(run.scheduler.fail(sample, reason, cause))
            self._check_progress(sample.group, reason)
        run.changed()

    def decided(self, group: Group, accepted: bool, reason: str) -> None:
        """Apply the decision of a user-written filter about a group; ``reason``: why it could not decide, or empty."""
        run, survivors = self._run, [sample.id for sample in group.scored]
        run.ledger.record_decision(group.id, accepted and not reason, reason, survivors)
        if reason:
            log.warning("group %s failed: %s", group.id, escape_line(reason))
            run.ledger.record_failure(survivors[0])
            run.last_failure = reason
        run.end_samples(run.scheduler.decide(group, accepted, reason))
        self._check_progress(group, reason, "group could be trained")
        run.changed()

    def _check_progress(self, group: Group, reason: str = "", what: str = "sample could be finished") -> None:
        """Fail a run that cannot make progress, and name a task that cannot.

        Args:
            group: the group of the event.
            reason: why a sample failed, or why the group could not be decided; empty: neither.
            what: what is missing if everything fails.
        """
        run, shares = self._run, self._run.scheduler.mixture.shares
        ended = group.id not in run.scheduler.groups
        if ended and shares[group.task].rejected == HOPELESS and len(shares) > 1:
            last = short_line(reason or run.scheduler.last_rejection, LAST_FAILURE_CHARACTERS)
            run.warn(
                f"task {group.task}: {HOPELESS} groups in a row were rejected or failed, the last one because {last};"
                " until one is accepted, no more of its groups start than its weight entitles it to; make the task"
                " easier or harder, check its reward, or change its groupFilter"
            )
        batch = run.spec.training.prompts_per_step
        if run.scheduler.failures_in_a_row > max(3, 2 * batch):
            last = short_line(reason, LAST_FAILURE_CHARACTERS)
            run.fail(TOO_MANY_FAILED, f"no {what} any more; the last failure: {last}")
        if run.scheduler.rejections_in_a_row > MAX_REJECTED_BATCHES * batch:
            run.fail(
                "AllGroupsFiltered",
                f"{run.scheduler.rejections_in_a_row} groups in a row were filtered, the last one because "
                f"{run.scheduler.last_rejection}; make the tasks easier or harder, check the reward, or change "
                "groupFilter of tasks or algorithm",
            )
