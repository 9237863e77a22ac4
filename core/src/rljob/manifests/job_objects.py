"""Objects of a job without pods: the claim of the storage, and the ConfigMap with job.json.

job.json is the manifest that the job's processes read.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rljob.api.models import RLJob
from rljob.manifests import names
from rljob.manifests.hashes import Inputs
from rljob.manifests.names import claim_name
from rljob.manifests.render_context import RenderContext, RenderedRole

KEY = "job.json"
"""Key in the ConfigMap, and name of the file in a pod."""


def storage(ctx: RenderContext) -> RenderedRole:
    """Return the storage's role. A retained claim has no owner, so deleting a job never deletes a trained model."""
    wanted, cluster = ctx.job.spec.storage, ctx.cluster
    role = ctx.role_key("storage")
    if wanted.claim is not None:
        return RenderedRole(role.name, role.kind, role.hash, ())
    spec: dict[str, Any] = {
        "accessModes": [*cluster.access_modes],
        "resources": {"requests": {"storage": wanted.size or cluster.storage_size}},
    }
    if cluster.storage_class:
        spec["storageClassName"] = cluster.storage_class
    claim = ctx.object(
        role,
        "PersistentVolumeClaim",
        claim_name(ctx.job.metadata.name),
        {"spec": spec},
        owned=wanted.retention == "Delete",
        annotations={names.SPEC_HASH: ctx.inputs.lasting},
    )
    return RenderedRole(role.name, role.kind, role.hash, (claim,))


def job_json(job: RLJob, inputs: Inputs) -> str:
    """Return job.json: the user's fields, not expanded, without the fields that only the operator reads.

    Processes expand it (:func:`rljob.api.resolve.resolve`). Defaults are omitted, so that a process of an older release
    never receives a field that a newer operator filled in.
    """
    content: dict[str, Any] = {
        "apiVersion": job.api_version,
        "kind": job.kind,
        "metadata": {"name": job.metadata.name},
        "spec": inputs.parts,
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=1).decode()


def config(ctx: RenderContext) -> RenderedRole:
    """Return the role of the job's configuration."""
    role = ctx.role_key("config", own=ctx.inputs.parts)
    data = {"data": {KEY: job_json(ctx.job, ctx.inputs)}}
    return RenderedRole(role.name, role.kind, role.hash, (ctx.object(role, "ConfigMap", ctx.name("job"), data),))
