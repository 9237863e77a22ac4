"""The status of an RLJobScale: what the scale subresource shows, which bound applies, and who sets the replicas."""

from __future__ import annotations

from typing import Any

from rljob.manifests.inputs import Object
from rljob.manifests.names import selector_text
from rljob.manifests.render_context import RenderedRole
from rljob.operator.object_kinds import ref_of
from rljob.operator.planning import ray_engine_state
from rljob.operator.planning.job_view import JobView, alive, wanted_replicas
from rljob.operator.planning.replica_decision import policies


def with_scale_status(view: JobView, role: RenderedRole, rendered: Object) -> Object:
    """Return an RLJobScale with the status that the scale subresource shows; unchanged while there are no pods."""
    replicas = len(ray_engine_state.engines(view, role)) if role.hosts > 1 else len(alive(view.pods.get(role.name, ())))
    child = view.observed.children.get(ref_of(rendered))
    if not replicas and (child is None or not child.body.get("status")):
        return rendered
    status: dict[str, Any] = {"replicas": replicas, "selector": selector_text(view.observed.metadata.name, role.name)}
    message = _limited(view, role.name) or _owned(view, role.name)
    if message or (child is not None and child.body.get("status", {}).get("message")):
        status["message"] = message
    return {**rendered, "status": status}


def _owned(view: JobView, role: str) -> str:
    """Return a message if something else sets the replicas that the built-in autoscaler would set; empty otherwise."""
    owner = view.observed.scale_owners.get(role, "")
    if not owner or role not in policies(view.job.spec):
        return ""
    return (
        f"{owner} has set the replicas, so the built-in autoscaler does not; delete this RLJobScale to give them back"
    )


def _limited(view: JobView, role: str) -> str:
    """Return a message if the replicas of the role's RLJobScale are outside its range; empty otherwise."""
    asked = view.observed.scales.get(role)
    limit = wanted_replicas(view.job, view.observed.scales).get(role, asked)
    if asked is None or limit is None or asked == limit:
        return ""
    bound = "maximum" if asked > limit else "minimum"
    return f"{asked} replicas are outside the range of role {role} in the RLJob: its {bound}, {limit}, applies"
