"""What may not take longer than the manifest says."""

from __future__ import annotations

from rljob.operator.planning import reasons
from rljob.operator.planning.draft import Draft
from rljob.operator.planning.roles import gang_waits
from rljob.operator.planning.scene import Scene
from rljob.operator.planning.times import remaining


def note_waiting(draft: Draft, scene: Scene) -> None:
    """Record since when pods of the gang wait for nodes, or are refused."""
    if not gang_waits(scene):
        draft.status.pending_since = None
    elif draft.status.pending_since is None:
        draft.status.pending_since = draft.instant


def overdue(draft: Draft, scene: Scene) -> tuple[str, str] | None:
    """Return reason and message if the run has to end."""
    status, spec = draft.status, scene.job.spec
    limit = spec.active_deadline_seconds
    if limit is not None and _over(draft, status.start_time, limit):
        since = f"the run began at {status.start_time}"
        return reasons.DEADLINE_EXCEEDED, f"{since} and may take {limit} s (spec.activeDeadlineSeconds)"
    limit = spec.failure_policy.pending_seconds
    if limit is not None and status.pending_since is not None and _over(draft, status.pending_since, limit):
        since = f"pods of the trainer or of engines have found no node, or were refused, since {status.pending_since}"
        return reasons.PODS_PENDING_TOO_LONG, f"{since}, longer than {limit} s (spec.failurePolicy.pendingSeconds)"
    return None


def _over(draft: Draft, since: str | None, limit: float) -> bool:
    left = remaining(since, limit, draft.now)
    draft.look_again(left)
    return left <= 0
