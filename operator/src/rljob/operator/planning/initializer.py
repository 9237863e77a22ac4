"""The initializer: it has to complete before any other pod of the job is made. Its Job backs off by itself."""

from __future__ import annotations

from dataclasses import dataclass

from rljob.api.status import RLJobStatus
from rljob.manifests.names import ROLE_HASH
from rljob.operator.planning import conditions, exits, reasons
from rljob.operator.planning.roles import LATE_SECONDS, Lack, lack_of
from rljob.operator.planning.scene import DISRUPTED, Scene, condition
from rljob.operator.planning.times import remaining
from rljob.operator.seen import Child

INITIALIZER = "initializer"


@dataclass(frozen=True)
class Stage:
    """Where the initializer is. ``done``: the other roles may start; ``over``: it failed for good; ``remove``: its Job,
    so that it is made again; ``lack``: what keeps its pod."""

    done: bool
    reason: str
    message: str
    over: bool = False
    remove: Child | None = None
    lack: Lack | None = None


def stage(scene: Scene, status: RLJobStatus) -> Stage:
    """Return where the initializer is. Once it has completed it is never run again, whatever becomes of its Job."""
    before = conditions.find(status, "Initialized")
    if before is not None and before.status == "True":
        return Stage(True, before.reason, before.message)
    role = scene.role(INITIALIZER)
    if role is None:
        return Stage(True, reasons.NO_INITIALIZER, "the job has no initializer")
    jobs = [child for child in scene.workloads(role.name) if child.kind == "Job"]
    if not jobs:
        return Stage(False, reasons.INITIALIZING, "the initializer is being started")
    job = jobs[0]
    if condition(job, "Complete", "SuccessCriteriaMet"):
        return Stage(True, reasons.INITIALIZED, "the initializer has completed")
    if job.metadata.annotations.get(ROLE_HASH) != role.hash:  # a Job's template cannot be changed
        message = "the manifest has changed: the initializer begins anew"
        return Stage(False, reasons.INITIALIZING, message, remove=job)
    failed = condition(job, "Failed", "FailureTarget")
    if failed is not None:
        message = str(failed.get("message", ""))
        if DISRUPTED in message:
            return Stage(False, reasons.INITIALIZING, "the initializer was disrupted and begins anew", remove=job)
        return Stage(False, reasons.INITIALIZER_FAILED, f"the initializer failed: {_end(scene) or message}", over=True)
    failures = job.body.get("status", {}).get("failed", 0)
    if failures:
        text = f"the initializer failed {failures} times and is tried again: {_end(scene)}"
        return Stage(
            False, reasons.INITIALIZER_FAILED, text.replace("1 times", "once"), lack=lack_of(scene, role, 1, 1)
        )
    lack = lack_of(scene, role, 1, 1)
    message = lack.text if lack is not None and late(job, scene.now) <= 0 else "the initializer runs"
    return Stage(False, reasons.INITIALIZING, message, lack=lack)


def late(job: Child, now: float) -> float:
    """Return the seconds until a pod that is not running counts as late."""
    return remaining(job.metadata.creation_timestamp, LATE_SECONDS, now)


def _end(scene: Scene) -> str:
    end = exits.newest_end(scene.pods.get(INITIALIZER, ()))
    return exits.with_log_end(end) if end else ""
