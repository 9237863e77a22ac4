"""Ends samples with or without a reward, and fails a run that cannot make progress."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rljob.api.text_escape import escape_line, short_line
from rljob.coordinator.trajectory import Trajectory
from rljob.ledger.states import Kind, State
from rljob.protocol import runner_protocol as m
from rljob.scheduling.groups import Cause, Ended, Group
from rljob.scheduling.mixture import MAX_REJECTIONS_IN_A_ROW

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
        self._rejected_tasks: set[str] = set()  # that a warning named

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
            self._check_no_progress()
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
            self._check_no_progress(reason)
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
        self._check_no_progress(reason, "group could be trained")
        run.changed()

    def warn_of_rejections(self, ended: Iterable[Ended]) -> None:
        """Name the tasks whose groups are all rejected, once each, if other tasks let the run continue.

        Args:
            ended: samples that have just ended.
        """
        run, shares = self._run, self._run.scheduler.mixture.shares
        last = {each.sample.group.task: each.reason for each in ended if each.end in ("filtered", "failed")}
        for task, reason in last.items():
            if not shares[task].all_rejected:
                self._rejected_tasks.discard(task)
            elif len(shares) > 1 and task not in self._rejected_tasks:
                self._rejected_tasks.add(task)
                because = short_line(reason, LAST_FAILURE_CHARACTERS)
                run.warn(
                    f"task {task}: {MAX_REJECTIONS_IN_A_ROW} groups in a row were rejected or failed, the last one"
                    f" because {because}; until one is accepted, no more of its groups start than its weight entitles"
                    " it to; make the task easier or harder, check its reward, or change its groupFilter"
                )

    def _check_no_progress(self, reason: str = "", what: str = "sample could be finished") -> None:
        run = self._run
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
