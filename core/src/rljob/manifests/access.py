"""What the coordinator may do with the Kubernetes API: read its own RLJob, and write its status."""

from __future__ import annotations

from rljob.manifests.context import Role
from rljob.manifests.scene import Scene

RBAC = "rbac.authorization.k8s.io"


def access(scene: Scene) -> Role:
    """Return the role of the coordinator's account."""
    role, name = scene.identity("access"), scene.name("coordinator")
    group, own = scene.job.api_version.partition("/")[0], [scene.job.metadata.name]
    rules = [
        {"apiGroups": [group], "resources": ["rljobs"], "resourceNames": own, "verbs": ["get", "list", "watch"]},
        {"apiGroups": [group], "resources": ["rljobs/status"], "resourceNames": own, "verbs": ["get", "patch"]},
    ]
    subject = {"kind": "ServiceAccount", "name": name, "namespace": scene.context.namespace}
    binding = {"roleRef": {"apiGroup": RBAC, "kind": "Role", "name": name}, "subjects": [subject]}
    objects = (
        scene.object(role, "ServiceAccount", name, {"automountServiceAccountToken": False}),
        scene.object(role, "Role", name, {"rules": rules}, api=f"{RBAC}/v1"),
        scene.object(role, "RoleBinding", name, binding, api=f"{RBAC}/v1"),
    )
    return Role(role.name, role.kind, role.hash, objects)
