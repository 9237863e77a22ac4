"""Suspension: the run writes a checkpoint and stops, then every pod is deleted; storage, settings and secrets stay."""

from __future__ import annotations

from rljob.api.job_status import RLJobStatus, RunState
from rljob.api.models import RLJobSpec
from rljob.operator.plan import COORDINATOR
from rljob.operator.planning import conditions, gang_placement, reasons, role_status, trainer
from rljob.operator.planning.job_view import JobView, alive, pods_by_role, role_of, workloads
from rljob.operator.planning.plan_builder import PlanBuilder
from rljob.operator.planning.timestamps import remaining, seconds_of

DEFAULT_GRACE_SECONDS: float = RLJobSpec.model_fields["suspend_grace_seconds"].default
"""Of a job whose spec cannot be read."""


def suspend(builder: PlanBuilder, view: JobView | None, evicted: str = "") -> None:
    """Suspend a job, or keep it suspended: nothing is started.

    ``view``: None: the spec is rejected. ``evicted``: message, if Kueue demands it.

    The coordinator reads `spec.suspend` and `status.evictedAt` itself and reports when it is done; a report for an
    earlier generation is ignored.
    """
    status, observed = builder.status, builder.observed
    since = seconds_of(status.suspended_at or "")
    begun = since is not None and is_suspended(status)
    if since is None or not begun or since > builder.now:  # the clock went back: the grace period starts again
        builder.record_first = not begun
        status.suspended_at = builder.instant
    status.draining, status.draining_since, status.pending_since = [], None, None
    running = workloads(observed)
    grace = float(observed.job.spec.suspend_grace_seconds if observed.job is not None else DEFAULT_GRACE_SECONDS)
    left = remaining(status.suspended_at, grace, builder.now)
    run = status.run
    if evicted and status.evicted_at is None:
        status.evicted_at = builder.instant
    answered = run is not None and run.state == "Suspended" and run.observed_generation >= observed.metadata.generation
    if any(role_of(child) == COORDINATOR for child in running) and not answered and left > 0:
        builder.requeue_after(left)
        if view is not None:
            status.roles, _ = role_status.survey(view, observed.status)
        stops = f"the run writes a checkpoint and stops; it has {grace:g} s (spec.suspendGraceSeconds)"
        _set_suspended(builder, False, f"{evicted}; {stops}" if evicted else stops)
        return
    builder.delete(running)
    builder.deletions.update(trainer.orphaned_jobs(observed))
    attempt = trainer.current_attempt(observed)
    pods = pods_by_role(observed.pods, attempt.number if attempt is not None else 1)
    status.roles = role_status.without_pods(observed.status, pods)
    if not evicted:
        gang_placement.release(builder)
        status.evicted_at = None
    if running or alive(observed.pods):
        _set_suspended(builder, False, f"{evicted}; pods are being deleted" if evicted else "pods are being deleted")
    else:
        status.gang_provider = ""
        _set_suspended(builder, True, "set spec.suspend to false to resume the run from its last checkpoint")


def _set_suspended(builder: PlanBuilder, done: bool, message: str) -> None:
    reason = reasons.SUSPENDED if done else reasons.SUSPENDING
    conditions.set_condition(builder, "Suspended", done, reason, message)
    conditions.set_condition(builder, "Ready", False, reason, message)


def is_suspended(status: RLJobStatus) -> bool:
    """Return whether the job is suspended or being suspended.

    Only the condition decides: `suspendedAt` may reappear after a resume if another client writes it too, and would
    then resume the job again and again.
    """
    found = conditions.find(status, "Suspended")
    return found is not None and found.reason in (reasons.SUSPENDING, reasons.SUSPENDED)


def resume(builder: PlanBuilder) -> None:
    """Resume a suspended job: its active deadline starts again."""
    status = builder.status
    status.suspended_at, status.pending_since = None, None
    if status.start_time is not None:
        status.start_time = builder.instant
    builder.record_first = True
    conditions.set_condition(builder, "Suspended", False, reasons.RESUMED, "the run is resumed")


def current_run(status: RLJobStatus) -> RunState | None:
    """Return status.run; None if the coordinator wrote it before the job was resumed.

    The Suspended condition keeps the generation of the resume, as nothing else sets it.
    """
    run, resumed = status.run, conditions.find(status, "Suspended")
    if run is not None and resumed is not None and run.observed_generation < resumed.observed_generation:
        return None
    return run
