"""The kinds of objects that the operator reads and writes."""

from __future__ import annotations

from rljob.kube.resource_kinds import PODS, RLJOBS, Resource

__all__ = [
    "AUTOSCALER",
    "BY_KIND",
    "CHILDREN",
    "CLAIM",
    "EVENTS",
    "FIELD_MANAGER",
    "LEASES",
    "OPTIONAL_CHILDREN",
    "PODS",
    "RLJOBS",
    "SCALE",
    "SECRETS",
    "Resource",
]

FIELD_MANAGER = "rljob-operator"
AUTOSCALER = "rljob-autoscaler"
"""Field manager of the built-in autoscaler. It owns `spec.replicas` of RLJobScales."""

SECRETS = Resource("", "v1", "secrets", "Secret")
EVENTS = Resource("", "v1", "events", "Event")
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")

CHILDREN = (
    Resource("apps", "v1", "deployments", "Deployment", pods=True),
    Resource("apps", "v1", "statefulsets", "StatefulSet", pods=True),
    Resource("batch", "v1", "jobs", "Job", pods=True),
    Resource("", "v1", "services", "Service"),
    Resource("", "v1", "configmaps", "ConfigMap"),
    Resource("", "v1", "serviceaccounts", "ServiceAccount"),
    Resource("rbac.authorization.k8s.io", "v1", "roles", "Role"),
    Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding"),
    Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim"),
    Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget"),
    Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy"),
    Resource("rljob.dev", "v1alpha1", "rljobscales", "RLJobScale"),
)
"""Kinds of a job's objects besides its pods and its Secret."""

CLAIM = "PersistentVolumeClaim"
SCALE = "RLJobScale"
"""Its replicas are set by the operator at creation only; afterwards they belong to autoscalers and users."""
OPTIONAL_CHILDREN = (Resource("keda.sh", "v1alpha1", "scaledobjects", "ScaledObject", optional=True),)
"""Kinds of a job's objects that another project installs."""
BY_KIND = {resource.kind: resource for resource in (*CHILDREN, *OPTIONAL_CHILDREN)}
"""Kind → all of these."""
