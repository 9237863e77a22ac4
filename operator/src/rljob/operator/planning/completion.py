"""The end of a job: deadlines, then the order in which its objects are removed.

Accelerators are freed at once, the coordinator answers for spec.keepCoordinatorSeconds, and the RLJob itself is deleted
after spec.ttlSecondsAfterFinished, if set. Failed Jobs are kept with their logs while the RLJob exists. Nothing is ever
started again.
"""

from __future__ import annotations

from typing import Literal

from rljob.api.job_status import RLJobStatus, RoleStatus
from rljob.operator.api_types import Child
from rljob.operator.plan import COORDINATOR, INITIALIZER, TRAINER
from rljob.operator.planning import conditions, gang_placement, reasons, role_status, trainer
from rljob.operator.planning.job_view import JobView, condition, pods_by_role, role_of, workloads
from rljob.operator.planning.plan_builder import PlanBuilder
from rljob.operator.planning.role_status import gang_waits
from rljob.operator.planning.timestamps import remaining


def end(builder: PlanBuilder, kind: Literal["Complete", "Failed"], reason: str, message: str) -> None:
    """End a job. The status is written first, because the pods that justify the decision are deleted."""
    status = builder.status
    status.completion_time = builder.instant
    conditions.set_condition(builder, kind, True, reason, message)
    builder.record_first = True
    clean_up(builder)


def is_over(status: RLJobStatus) -> bool:
    """Return whether the job has ended."""
    return any(conditions.is_true(status, kind) for kind in ("Complete", "Failed"))


def clean_up(builder: PlanBuilder) -> None:
    """Delete the objects that an ended job does not need."""
    status, job = builder.status, builder.observed.job
    status.draining, status.draining_since, status.pending_since = [], None, None
    if status.completion_time is None:  # another client removed it: the periods start again
        status.completion_time = builder.instant
    keep = float(job.spec.keep_coordinator_seconds) if job is not None else float("inf")
    left = remaining(status.completion_time, keep, builder.now)
    running, kept_jobs = workloads(builder.observed), _kept_jobs(builder)
    kept = {child.metadata.uid for child in kept_jobs}
    if left > 0:
        kept |= {child.metadata.uid for child in running if role_of(child) == COORDINATOR}
    builder.delete(child for child in running if child.metadata.uid not in kept)
    builder.deletions.update(trainer.orphaned_jobs(builder.observed))
    gang_placement.release(builder)
    answering = left > 0 and any(role_of(child) == COORDINATOR for child in running)
    if answering and job is not None:
        builder.requeue_after(left)
    status.roles = _roles_without_pods(builder, answering, {role_of(child) for child in kept_jobs})
    failed = conditions.find(status, "Failed")
    if failed is not None and failed.status == "True":
        conditions.set_condition(builder, "Ready", False, reasons.FAILED, f"{failed.reason}: {failed.message}")
    else:
        conditions.set_condition(builder, "Ready", True, reasons.SUCCEEDED, "the run has succeeded")
    _delete_after_ttl(builder)


def _kept_jobs(builder: PlanBuilder) -> list[Child]:
    """Return the failed Jobs that are kept with their logs: the initializer's, and the newest of the trainer.

    A failed Job keeps no running pods; the Job controller ends them.
    """
    if not conditions.is_true(builder.status, "Failed"):
        return []
    attempt = trainer.current_attempt(builder.observed)
    newest = trainer.jobs(builder.observed).get(attempt.number) if attempt is not None else None
    return [
        child
        for child in workloads(builder.observed)
        if child.kind == "Job"
        and (role_of(child) == INITIALIZER or (role_of(child) == TRAINER and child is newest))
        and condition(child, "Failed", "FailureTarget") is not None
    ]


def _roles_without_pods(builder: PlanBuilder, answering: bool, kept: set[str]) -> list[RoleStatus]:
    """Return the status of the roles. The recorded exit of a role in ``kept`` is not updated, as its kept pods would
    change it from the first exit of the group to the last."""
    before = builder.observed.status
    pods = pods_by_role(builder.observed.pods, before.trainer.number if before.trainer else 1)
    exits = {role.name: role.last_exit for role in before.roles if role.name in kept} if is_over(before) else {}
    return [
        role.model_copy(
            update={
                "desired": 1 if answering and role.name == COORDINATOR else role.desired,
                "last_exit": exits.get(role.name, role.last_exit),
            }
        )
        for role in role_status.without_pods(before, pods)
    ]


def _delete_after_ttl(builder: PlanBuilder) -> None:
    job = builder.observed.job
    if job is None or job.spec.ttl_seconds_after_finished is None:
        return
    left = remaining(builder.status.completion_time, job.spec.ttl_seconds_after_finished, builder.now)
    builder.delete_job = left <= 0
    builder.requeue_after(left)


def record_pending(builder: PlanBuilder, view: JobView) -> None:
    """Record since when pods of the gang are pending or refused."""
    if not gang_waits(view):
        builder.status.pending_since = None
    elif builder.status.pending_since is None:
        builder.status.pending_since = builder.instant


def overdue(builder: PlanBuilder, view: JobView) -> tuple[str, str] | None:
    """Return reason and message if a deadline has passed."""
    status, spec = builder.status, view.job.spec
    limit = spec.active_deadline_seconds
    if limit is not None and _has_passed(builder, status.start_time, limit):
        since = f"the run started at {status.start_time}"
        return reasons.DEADLINE_EXCEEDED, f"{since} and exceeded spec.activeDeadlineSeconds ({limit} s)"
    limit = spec.failure_policy.pending_seconds
    if limit is not None and status.pending_since is not None and _has_passed(builder, status.pending_since, limit):
        since = f"pods of the trainer or of engines have been unschedulable or refused since {status.pending_since}"
        return reasons.PENDING_TIMEOUT, f"{since}, longer than spec.failurePolicy.pendingSeconds ({limit} s)"
    return None


def _has_passed(builder: PlanBuilder, since: str | None, limit: float) -> bool:
    left = remaining(since, limit, builder.now)
    builder.requeue_after(left)
    return left <= 0
