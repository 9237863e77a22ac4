"""Budgets of disruption. A drain takes the pods of a role one at a time, and each time waits for the one that takes its
place. Where no node has room for that one it would wait for ever: a pod that finds no node for long protects nothing,
so it makes room for the next one to be taken."""

from __future__ import annotations

from rljob.manifests.inputs import Object
from rljob.manifests.render_context import RenderedRole
from rljob.operator.planning.draft import Draft
from rljob.operator.planning.scene import Scene, alive, pod_condition
from rljob.operator.planning.times import remaining
from rljob.operator.seen import Pod

PATIENCE = 300.0
"""Seconds that a pod has to find a node: a cluster that grows makes one meanwhile."""


def with_room(draft: Draft, scene: Scene, role: RenderedRole, rendered: Object) -> Object:
    """Return a budget under which a pod may be taken besides those that find no node; other objects, and budgets that
    say how many pods there are to be, as they are."""
    bound = rendered["spec"].get("maxUnavailable")
    if bound is None:
        return rendered
    waits = [left for pod in alive(scene.pods.get(role.name, ())) if (left := _patience(pod, draft.now)) is not None]
    for left in waits:
        draft.look_again(left)
    lost = sum(left <= 0 for left in waits)
    return {**rendered, "spec": {**rendered["spec"], "maxUnavailable": bound + lost}} if lost else rendered


def _patience(pod: Pod, now: float) -> float | None:
    """Return the seconds that a pod still has to find a node; None for one that has found one."""
    scheduled = pod_condition(pod, "PodScheduled")
    if scheduled is None or scheduled.status != "False":
        return None
    return remaining(scheduled.last_transition_time or pod.metadata.creation_timestamp, PATIENCE, now)
