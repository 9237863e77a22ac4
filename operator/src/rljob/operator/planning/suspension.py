"""Suspension: the run is told to end in good order, then every pod is freed; storage, settings and secrets stay."""

from __future__ import annotations

from rljob.api.status import RLJobStatus, Run
from rljob.operator.plan import COORDINATOR
from rljob.operator.planning import conditions, reasons, roles, trainer
from rljob.operator.planning.job_view import Scene, alive, pods_by_role, workloads
from rljob.operator.planning.plan_builder import Draft
from rljob.operator.planning.timestamps import remaining, seconds_of


def suspend(draft: Draft, scene: Scene) -> None:
    """Suspend a job, or keep it suspended: nothing is started.

    The coordinator reads `spec.suspend` itself and says when it is done; what it said of an earlier spec does not
    count.
    """
    status, observed = draft.status, draft.observed
    since = seconds_of(status.suspended_at or "")
    begun = since is not None and is_suspended(status)
    if since is None or not begun or since > draft.now:  # the clock went back: the grace begins anew
        draft.record_first = not begun
        status.suspended_at = draft.instant
    status.draining, status.draining_since, status.pending_since = [], None, None
    running = workloads(observed)
    grace = scene.job.spec.suspend_grace_seconds
    left = remaining(status.suspended_at, grace, draft.now)
    run = status.run
    answered = run is not None and run.state == "Suspended" and run.observed_generation >= observed.metadata.generation
    if scene.workloads(COORDINATOR) and not answered and left > 0:
        draft.look_again(left)
        status.roles, _ = roles.survey(scene, observed.status)
        _say(draft, False, f"the run writes a checkpoint and stops; it has {grace:g} s (spec.suspendGraceSeconds)")
        return
    draft.delete(running)
    draft.deletions.update(trainer.strays(observed))
    pods = pods_by_role(observed.pods, scene.attempt.number)
    status.roles = roles.at_rest(observed.status, pods)
    if running or alive(observed.pods):
        _say(draft, False, "pods are being deleted")
    else:
        _say(draft, True, "set spec.suspend to false and the run goes on from its last checkpoint")


def _say(draft: Draft, done: bool, message: str) -> None:
    reason = reasons.SUSPENDED if done else reasons.SUSPENDING
    conditions.set_condition(draft, "Suspended", done, reason, message)
    conditions.set_condition(draft, "Ready", False, reason, message)


def is_suspended(status: RLJobStatus) -> bool:
    """Return whether the job is suspended, or about to be.

    The condition alone says so: `suspendedAt` may come back after a resume, if somebody else writes it too, and would
    then have the job resumed again and again.
    """
    found = conditions.find(status, "Suspended")
    return found is not None and found.reason in (reasons.SUSPENDING, reasons.SUSPENDED)


def resume(draft: Draft) -> None:
    """Take up a job that was suspended: the time it may take begins anew."""
    status = draft.status
    status.suspended_at, status.pending_since = None, None
    if status.start_time is not None:
        status.start_time = draft.instant
    draft.record_first = True
    conditions.set_condition(draft, "Suspended", False, reasons.RESUMED, "the run goes on")


def present_run(status: RLJobStatus) -> Run | None:
    """Return what the coordinator says; None if it said that before the job was resumed, and has not been back since.

    The condition keeps the generation of the resume, as nothing else sets it.
    """
    run, resumed = status.run, conditions.find(status, "Suspended")
    if run is not None and resumed is not None and run.observed_generation < resumed.observed_generation:
        return None
    return run
