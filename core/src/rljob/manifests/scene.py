"""What the files of the roles share: the job, where it is rendered, and how an object is put together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rljob.api.models import RLJob
from rljob.manifests import labels as l
from rljob.manifests.context import Cluster, Context, Object
from rljob.manifests.hashes import Inputs, intent
from rljob.manifests.names import object_name, role_name


@dataclass(frozen=True)
class Identity:
    """A role, and the hash of its inputs. ``entry``: name of its pool or reward."""

    kind: str
    hash: str
    entry: str = ""

    @property
    def name(self) -> str:
        """Name of the role."""
        return role_name(self.kind, self.entry)


@dataclass(frozen=True)
class Scene:
    """A job that is being rendered."""

    job: RLJob
    context: Context
    inputs: Inputs

    @property
    def cluster(self) -> Cluster:
        """Settings of the cluster."""
        return self.context.cluster

    def identity(self, kind: str, entry: str = "", own: Any = None) -> Identity:
        """Return the identity of a role whose own fields, such as its template, are ``own``."""
        return Identity(kind, self.inputs.role(kind, entry, own), entry)

    def name(self, *rest: str) -> str:
        """Return the name of an object of the job."""
        return object_name(self.job.metadata.name, *rest)

    def labels(self, role: Identity) -> dict[str, str]:
        """Return the labels of a role's objects and pods."""
        return l.labels(self.job.metadata.name, role.kind, role.name)

    def selector(self, role: Identity) -> dict[str, str]:
        """Return the labels by which a role's pods are selected."""
        return l.selector(self.job.metadata.name, role.name)

    def object(
        self,
        role: Identity,
        kind: str,
        name: str,
        body: dict[str, Any],
        *,
        api: str = "v1",
        owned: bool = True,
        annotations: dict[str, str] | None = None,
        labels: dict[str, str] | None = None,
    ) -> Object:
        """Return an object of ``role``: ``body`` with identity, labels, owner and the two hashes.

        Args:
            owned: whether it goes with the job.
            annotations: more of them.
            labels: more of them.
        """
        metadata: dict[str, Any] = {
            "name": name,
            "namespace": self.context.namespace,
            "labels": self.labels(role) | (labels or {}),
            "annotations": annotations or {},
        }
        if owned and self.context.uid:
            metadata["ownerReferences"] = [self._owner()]
        rendered: Object = {"apiVersion": api, "kind": kind, "metadata": metadata, **body}
        own = {l.ROLE_HASH: role.hash, l.INTENT: intent(rendered)}
        metadata["annotations"] = metadata["annotations"] | own
        return rendered

    def _owner(self) -> dict[str, Any]:
        return {
            "apiVersion": self.job.api_version,
            "kind": self.job.kind,
            "name": self.job.metadata.name,
            "uid": self.context.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }
