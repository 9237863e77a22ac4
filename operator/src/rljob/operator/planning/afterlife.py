"""The end of a job: accelerators are freed at once, the coordinator answers a while longer, then the job itself goes.

What failed is kept for reading as long as the job is. Nothing is ever started again.
"""

from __future__ import annotations

from typing import Literal

from rljob.api.status import RLJobStatus, RoleStatus
from rljob.operator.planning import conditions, reasons, roles, trainer
from rljob.operator.planning.draft import Draft
from rljob.operator.planning.initializer import INITIALIZER
from rljob.operator.planning.scene import condition, pods_by_role, role_of, workloads
from rljob.operator.planning.suspension import COORDINATOR
from rljob.operator.planning.times import remaining
from rljob.operator.planning.trainer import TRAINER
from rljob.operator.seen import Child


def end(draft: Draft, kind: Literal["Complete", "Failed"], reason: str, message: str) -> None:
    """End a job. It is recorded before anything follows from it, as what it was decided on goes with the pods."""
    status = draft.status
    status.completion_time = draft.instant
    conditions.set_condition(draft, kind, True, reason, message)
    draft.record_first = True
    tidy(draft)


def is_over(status: RLJobStatus) -> bool:
    """Return whether the job has ended."""
    return any(conditions.is_true(status, kind) for kind in ("Complete", "Failed"))


def tidy(draft: Draft) -> None:
    """Free what a job that has ended still has."""
    status, job = draft.status, draft.observed.job
    status.draining, status.draining_since, status.pending_since = [], None, None
    if status.completion_time is None:  # somebody took it away: its times begin anew
        status.completion_time = draft.instant
    keep = float(job.spec.keep_coordinator_seconds) if job is not None else float("inf")
    left = remaining(status.completion_time, keep, draft.now)
    running, evidence = workloads(draft.observed), _evidence(draft)
    kept = {child.metadata.uid for child in evidence}
    if left > 0:
        kept |= {child.metadata.uid for child in running if role_of(child) == COORDINATOR}
    draft.delete(child for child in running if child.metadata.uid not in kept)
    draft.deletions.update(trainer.strays(draft.observed))
    answering = left > 0 and any(role_of(child) == COORDINATOR for child in running)
    if answering and job is not None:
        draft.look_again(left)
    status.roles = _at_rest(draft, answering, {role_of(child) for child in evidence})
    failed = conditions.find(status, "Failed")
    if failed is not None and failed.status == "True":
        conditions.set_condition(draft, "Ready", False, reasons.FAILED, f"{failed.reason}: {failed.message}")
    else:
        conditions.set_condition(draft, "Ready", False, reasons.SUCCEEDED, "the run has succeeded")
    _expire(draft)


def _evidence(draft: Draft) -> list[Child]:
    """Return the Jobs that stay for people to read: the initializer's and the trainer's newest, if they have failed.

    Such a Job holds nothing: what still runs of it is ended by whoever said that it has failed.
    """
    if not conditions.is_true(draft.status, "Failed"):
        return []
    attempt = trainer.present(draft.observed)
    newest = trainer.jobs(draft.observed).get(attempt.number) if attempt is not None else None
    return [
        child
        for child in workloads(draft.observed)
        if child.kind == "Job"
        and (role_of(child) == INITIALIZER or (role_of(child) == TRAINER and child is newest))
        and condition(child, "Failed", "FailureTarget") is not None
    ]


def _at_rest(draft: Draft, answering: bool, kept: set[str]) -> list[RoleStatus]:
    """Return the roles. How a role in ``kept`` ended is on record, and its pods, which stay, do not say it again: of a
    group that died they would have the last death, not the first."""
    before = draft.observed.status
    pods = pods_by_role(draft.observed.pods, before.trainer.number if before.trainer else 1)
    ends = {role.name: role.last_exit for role in before.roles if role.name in kept} if is_over(before) else {}
    return [
        role.model_copy(
            update={
                "desired": 1 if answering and role.name == COORDINATOR else role.desired,
                "last_exit": ends.get(role.name, role.last_exit),
            }
        )
        for role in roles.at_rest(before, pods)
    ]


def _expire(draft: Draft) -> None:
    job = draft.observed.job
    if job is None or job.spec.ttl_seconds_after_finished is None:
        return
    left = remaining(draft.status.completion_time, job.spec.ttl_seconds_after_finished, draft.now)
    draft.delete_job = left <= 0
    draft.look_again(left)
