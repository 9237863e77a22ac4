"""The kinds of objects that the operator reads and writes."""

from __future__ import annotations

from rljob.kube.resource_kinds import PODS, RLJOBS, Resource
from rljob.manifests.gang import (
    COSCHEDULING_GROUP,
    COSCHEDULING_VERSION,
    KUEUE_GROUP,
    KUEUE_VERSION,
    NATIVE_GROUP,
    NATIVE_VERSION,
    VOLCANO_GROUP,
    VOLCANO_VERSION,
)
from rljob.manifests.inputs import Object

__all__ = [
    "AUTOSCALER",
    "BY_KEY",
    "CHILDREN",
    "CLAIM",
    "EVENTS",
    "FIELD_MANAGER",
    "GANG_CHILDREN",
    "KUEUE_WORKLOADS",
    "LEASES",
    "NATIVE_POD_GROUPS",
    "OPTIONAL_CHILDREN",
    "PODS",
    "RLJOBS",
    "SCALE",
    "SECRETS",
    "Resource",
    "ref_of",
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
NATIVE_POD_GROUPS = Resource(
    NATIVE_GROUP,
    NATIVE_VERSION,
    "podgroups",
    "PodGroup",
    project="the feature gates GenericWorkload and GangScheduling of Kubernetes, and its API group version",
    shared_name=True,
    versions=("v1beta1", NATIVE_VERSION),
)
KUEUE_WORKLOADS = Resource(KUEUE_GROUP, KUEUE_VERSION, "workloads", "Workload", project="Kueue", shared_name=True)
GANG_CHILDREN = (
    NATIVE_POD_GROUPS,
    Resource(VOLCANO_GROUP, VOLCANO_VERSION, "podgroups", "PodGroup", project="Volcano", shared_name=True),
    Resource(
        COSCHEDULING_GROUP, COSCHEDULING_VERSION, "podgroups", "PodGroup", project="scheduler-plugins", shared_name=True
    ),
    KUEUE_WORKLOADS,
)
"""Kinds that describe the gang of a job, one for each provider."""
OPTIONAL_CHILDREN = (
    Resource("keda.sh", "v1alpha1", "scaledobjects", "ScaledObject", project="KEDA"),
    Resource("ray.io", "v1", "rayclusters", "RayCluster", pods=True, project="KubeRay"),
    *GANG_CHILDREN,
)
"""Kinds of a job's objects that another project or a feature gate adds."""
BY_KEY = {resource.key: resource for resource in (*CHILDREN, *OPTIONAL_CHILDREN)}
"""Key of a kind → all of these."""
_KEYS = {(resource.group, resource.kind): resource.key for resource in BY_KEY.values()}


def ref_of(rendered: Object) -> tuple[str, str]:
    """Return key of the kind, and name, of a rendered object."""
    group, kind = str(rendered["apiVersion"]).rpartition("/")[0], str(rendered["kind"])
    return _KEYS.get((group, kind), kind), rendered["metadata"]["name"]
