"""The initializer must complete before other pods of the job are created. The Job controller backs off its retries."""

from __future__ import annotations

from dataclasses import dataclass

from rljob.api.job_status import RLJobStatus
from rljob.manifests.names import ROLE_HASH
from rljob.operator.api_types import Child
from rljob.operator.plan import INITIALIZER
from rljob.operator.planning import conditions, reasons
from rljob.operator.planning.container_exits import end_lag_left, newest_end, with_log_end
from rljob.operator.planning.job_view import DISRUPTED, JobView, condition
from rljob.operator.planning.role_status import LATE_SECONDS, RoleProblem, problem_of
from rljob.operator.planning.timestamps import remaining


@dataclass(frozen=True)
class InitializerStage:
    """State of the initializer. ``done``: the other roles may start; ``over``: it has failed and is not retried;
    ``remove``: its Job, which is deleted and created again; ``problem``: why its pod does not run; ``requeue_after``:
    seconds, 0: never."""

    done: bool
    reason: str
    message: str
    over: bool = False
    remove: Child | None = None
    problem: RoleProblem | None = None
    requeue_after: float = 0.0


def stage(view: JobView, status: RLJobStatus) -> InitializerStage:
    """Return the state of the initializer. Once complete, it never runs again, even if its Job is deleted."""
    before = conditions.find(status, "Initialized")
    if before is not None and before.status == "True":
        return InitializerStage(True, before.reason, before.message)
    role = view.role(INITIALIZER)
    if role is None:
        return InitializerStage(True, reasons.NO_INITIALIZER, "the job has no initializer")
    jobs = [child for child in view.workloads(role.name) if child.kind == "Job"]
    if not jobs:
        return InitializerStage(False, reasons.INITIALIZING, "the initializer is being started")
    job = jobs[0]
    if condition(job, "Complete", "SuccessCriteriaMet"):
        return InitializerStage(True, reasons.INITIALIZED, "the initializer has completed")
    if job.metadata.annotations.get(ROLE_HASH) != role.hash:  # a Job's template cannot be changed
        message = "the manifest has changed: the initializer is started again"
        return InitializerStage(False, reasons.INITIALIZING, message, remove=job)
    failed = condition(job, "Failed", "FailureTarget")
    if failed is not None:
        message = str(failed.get("message", ""))
        if DISRUPTED in message:
            return InitializerStage(
                False, reasons.INITIALIZING, "the initializer was disrupted and is started again", remove=job
            )
        end = _end(view)
        left = end_lag_left(view.pods.get(INITIALIZER, ()), failed, view.now)
        if not end and left > 0:
            return InitializerStage(False, reasons.INITIALIZING, "the initializer runs", requeue_after=left)
        return InitializerStage(
            False, reasons.INITIALIZER_FAILED, f"the initializer failed: {end or message}", over=True
        )
    failures = job.body.get("status", {}).get("failed", 0)
    if failures:
        text = f"the initializer failed {failures} times and is retried: {_end(view)}"
        return InitializerStage(
            False, reasons.INITIALIZER_FAILED, text.replace("1 times", "once"), problem=problem_of(view, role, 1, 1)
        )
    problem = problem_of(view, role, 1, 1)
    message = problem.text if problem is not None and late(job, view.now) <= 0 else "the initializer runs"
    return InitializerStage(False, reasons.INITIALIZING, message, problem=problem)


def late(job: Child, now: float) -> float:
    """Return the seconds until a Job whose pod is not running counts as late."""
    return remaining(job.metadata.creation_timestamp, LATE_SECONDS, now)


def _end(view: JobView) -> str:
    end = newest_end(view.pods.get(INITIALIZER, ()))
    return with_log_end(end) if end else ""
