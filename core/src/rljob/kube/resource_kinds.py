"""Kinds of objects and their URL paths, and content types of patches."""

from __future__ import annotations

from dataclasses import dataclass

MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
"""Content type of server-side apply. JSON bodies are valid, because JSON is a subset of YAML."""


@dataclass(frozen=True)
class Resource:
    """One kind of namespaced object."""

    group: str
    """API group; empty for the core group."""
    version: str
    plural: str
    kind: str
    pods: bool = False
    """Whether the kind is a workload: a controller creates pods for it."""
    project: str = ""
    """What installs the kind, which a cluster may lack; empty: the kind is always there."""
    shared_name: bool = False
    """Whether kinds of other groups have the same name."""
    versions: tuple[str, ...] = ()
    """Versions with the same fields, of which a cluster may serve only one; the first that it serves is used. Empty:
    ``version`` alone."""

    @property
    def optional(self) -> bool:
        """Whether a cluster may lack the kind, because another project or a feature gate adds it."""
        return bool(self.project)

    @property
    def key(self) -> str:
        """Name of the kind in the operator."""
        return f"{self.kind}.{self.group}" if self.shared_name else self.kind

    @property
    def metric_label(self) -> str:
        """Value of the label `resource` of metrics."""
        return f"{self.plural}.{self.group}" if self.shared_name else self.plural

    @property
    def api_version(self) -> str:
        """Value of apiVersion."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Return the path of an object; without ``name``, of a collection; without ``namespace``, in all namespaces."""
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        parts += ["namespaces", namespace, self.plural] if namespace else [self.plural]
        return "/" + "/".join([*parts, *filter(None, (name, subresource))])


RLJOBS = Resource("rljob.dev", "v1alpha1", "rljobs", "RLJob")
PODS = Resource("", "v1", "pods", "Pod")
