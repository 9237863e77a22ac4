"""The kinds of objects that the operator reads and writes, and where the API serves them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Resource:
    """One kind of object, all of them in namespaces."""

    group: str
    """Empty for the core group."""
    version: str
    plural: str
    kind: str
    pods: bool = False
    """Pods follow from it."""

    @property
    def api_version(self) -> str:
        """Value of apiVersion."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Return the path of an object or, without ``name``, of a collection (of all namespaces without one)."""
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        parts += ["namespaces", namespace, self.plural] if namespace else [self.plural]
        return "/" + "/".join([*parts, *filter(None, (name, subresource))])


RLJOBS = Resource("rljob.dev", "v1alpha1", "rljobs", "RLJob")
PODS = Resource("", "v1", "pods", "Pod")
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
"""What a job may consist of besides its pods and its Secret."""

BY_KIND = {resource.kind: resource for resource in CHILDREN}
