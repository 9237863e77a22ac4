"""Types that the renderers of all roles share: the key of a role, its rendered objects, and the context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from rljob.api.model_address import is_remote
from rljob.api.models import RLJob
from rljob.manifests import names
from rljob.manifests.hashes import Inputs, rendered_hash
from rljob.manifests.inputs import Cluster, Object, RenderTarget
from rljob.manifests.names import object_name, role_name

Volume: TypeAlias = tuple[dict[str, Any], str]
"""A volume and its mount path."""


@dataclass(frozen=True)
class RoleKey:
    """A role, and the hash of its inputs. ``entry``: name of the role's pool, reward or environment; empty for other
    roles."""

    kind: str
    hash: str
    entry: str = ""

    @property
    def name(self) -> str:
        """Name of the role."""
        return role_name(self.kind, self.entry)


@dataclass(frozen=True)
class RenderedRole:
    """The rendered objects of one role of a job.

    ``name``: storage, config, access, network, initializer, coordinator, runner, trainer, rollout-POOL, reward-NAME,
    environment-NAME.
    ``kind``: the name without POOL and NAME.
    ``hash``: hash of the manifest fields that the role's pods depend on (inputs, never the output; without replicas).
    """

    name: str
    kind: str
    hash: str
    objects: tuple[Object, ...]
    desired: int = 0
    """Desired pods, of a pool engines; 0 for roles without pods."""
    hosts: int = 1
    """Pods of one engine of a pool."""


@dataclass(frozen=True)
class RenderContext:
    """The job that is rendered, the target for which it is rendered, and the inputs of its hashes."""

    job: RLJob
    target: RenderTarget
    inputs: Inputs

    @property
    def cluster(self) -> Cluster:
        """Settings of the cluster."""
        return self.target.cluster

    @property
    def downloads_models(self) -> bool:
        """Whether the job has a remote model."""
        return any(is_remote(model.source) for model in self.job.spec.models)

    @property
    def copies_checkpoints(self) -> bool:
        """Whether the trainer copies its checkpoints."""
        return self.job.spec.checkpoints.uri is not None

    def role_key(self, kind: str, entry: str = "", own: Any = None, reads_models: bool = False) -> RoleKey:
        """Return the key of a role. ``own``: the role's own fields, for example its template. ``reads_models``: whether
        its pods read models, and so download remote ones."""
        uses = (reads_models and self.downloads_models) or (kind == "trainer" and self.copies_checkpoints)
        downloads = self.inputs.written.get("downloads") if uses else None
        return RoleKey(kind, self.inputs.role(kind, entry, own, *([downloads] if downloads else [])), entry)

    def name(self, *rest: str) -> str:
        """Return the name of an object of the job."""
        return object_name(self.job.metadata.name, *rest)

    def labels(self, role: RoleKey) -> dict[str, str]:
        """Return the labels of a role's objects and pods."""
        return names.labels(self.job.metadata.name, role.kind, role.name)

    def selector(self, role: RoleKey) -> dict[str, str]:
        """Return the selector of a role's pods."""
        return names.selector(self.job.metadata.name, role.name)

    def object(
        self,
        role: RoleKey,
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
            role: role of the object.
            kind: kind of the object.
            name: name of the object.
            body: fields besides apiVersion, kind and metadata.
            api: apiVersion of the object.
            owned: whether the object is deleted with the job.
            annotations: additional annotations.
            labels: additional labels.
        """
        metadata: dict[str, Any] = {
            "name": name,
            "namespace": self.target.namespace,
            "labels": self.labels(role) | (labels or {}),
            "annotations": annotations or {},
        }
        if owned and self.target.uid:
            metadata["ownerReferences"] = [self._owner()]
        rendered: Object = {"apiVersion": api, "kind": kind, "metadata": metadata, **body}
        own = {names.ROLE_HASH: role.hash, names.RENDERED_HASH: rendered_hash(rendered)}
        metadata["annotations"] = metadata["annotations"] | own
        return rendered

    def _owner(self) -> dict[str, Any]:
        return {
            "apiVersion": self.job.api_version,
            "kind": self.job.kind,
            "name": self.job.metadata.name,
            "uid": self.target.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }
