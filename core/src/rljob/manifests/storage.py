"""The job's storage: a claim, unless the user names one."""

from __future__ import annotations

from typing import Any

from rljob.manifests import labels as l
from rljob.manifests.context import Role
from rljob.manifests.names import claim_name
from rljob.manifests.scene import Scene


def storage(scene: Scene) -> Role:
    """Return the storage's role. A retained claim has no owner: deleting a job never deletes a trained model."""
    wanted, cluster = scene.job.spec.storage, scene.cluster
    role = scene.identity("storage")
    if wanted.claim is not None:
        return Role(role.name, role.kind, role.hash, ())
    spec: dict[str, Any] = {
        "accessModes": [*cluster.access_modes],
        "resources": {"requests": {"storage": wanted.size or cluster.storage_size}},
    }
    if cluster.storage_class:
        spec["storageClassName"] = cluster.storage_class
    claim = scene.object(
        role,
        "PersistentVolumeClaim",
        claim_name(scene.job.metadata.name),
        {"spec": spec},
        owned=wanted.retention == "Delete",
        annotations={l.SPEC_HASH: scene.inputs.lasting},
    )
    return Role(role.name, role.kind, role.hash, (claim,))
