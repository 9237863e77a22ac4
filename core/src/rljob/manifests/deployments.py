"""What roles share that run as Deployments, and budgets of disruption."""

from __future__ import annotations

from typing import Any

from rljob.api.roles import Replicas
from rljob.manifests.context import Object
from rljob.manifests.scene import Identity, Scene

PROGRESS_DEADLINE_SECONDS = 3600
"""Large models take long to load."""


def replicas_of(scene: Scene, role: Identity, replicas: Replicas) -> int:
    """Return how many pods a role shall have."""
    return scene.context.replicas.get(role.name, replicas.min)


def deployment(
    scene: Scene,
    role: Identity,
    name: str,
    replicas: int,
    template: Object,
    more_labels: dict[str, str] | None = None,
) -> Object:
    """Return a Deployment; ``more_labels`` tells its pods from those of another Deployment of the role."""
    spec = {
        "replicas": replicas,
        "revisionHistoryLimit": 1,
        "progressDeadlineSeconds": PROGRESS_DEADLINE_SECONDS,
        # No pod more than there shall be: accelerators and quotas have no room for one.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": "25%"}},
        "selector": {"matchLabels": scene.selector(role) | (more_labels or {})},
        "template": template,
    }
    return scene.object(role, "Deployment", name, {"spec": spec}, api="apps/v1", labels=more_labels)


def scale(scene: Scene, role: Identity, replicas: Replicas) -> list[Object]:
    """Return the RLJobScale of a role that may grow. Its replicas are what it is made with; they are others' to set."""
    if replicas.max is None or replicas.max <= replicas.min:
        return []
    body = {"spec": {"job": scene.job.metadata.name, "role": role.name, "replicas": replicas.min}}
    api = scene.job.api_version
    return [scene.object(role, "RLJobScale", scene.name(role.name), body, api=api)]


def disruption_budget(scene: Scene, role: Identity, min_available: int | None = None) -> Object:
    """Return the budget of pods of which one may be missing: a drain takes them one at a time.

    With ``min_available`` so many are to be there always. That is the form for the pods of a Job, of which Kubernetes
    does not know how many there shall be: it would refuse every eviction for ever.
    """
    bound = {"maxUnavailable": 1} if min_available is None else {"minAvailable": min_available}
    body: dict[str, Any] = {
        "spec": {
            **bound,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": scene.selector(role)},
        }
    }
    return scene.object(role, "PodDisruptionBudget", scene.name(role.name), body, api="policy/v1")
