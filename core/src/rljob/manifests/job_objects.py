"""Objects of a job without pods: the claims of storage and ledger, and the ConfigMap with job.json.

job.json is the manifest that the job's processes read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rljob.api.models import RLJob
from rljob.manifests import names
from rljob.manifests.hashes import Inputs
from rljob.manifests.inputs import Object
from rljob.manifests.names import claim_name, ledger_claim_name
from rljob.manifests.render_context import RenderContext, RenderedRole, RoleKey

KEY = "job.json"
"""Key in the ConfigMap, and name of the file in a pod."""


def storage(ctx: RenderContext) -> RenderedRole:
    """Return the role of the claims: of the storage, and of the ledger if it has a volume of its own."""
    job, wanted, cluster = ctx.job.metadata.name, ctx.job.spec.storage, ctx.cluster
    role = ctx.role_key("storage")
    claims: list[Object] = []
    if wanted.claim is None:
        size, modes = wanted.size or cluster.storage_size, wanted.access_modes or cluster.access_modes
        claims.append(_claim(ctx, role, claim_name(job), size, modes, wanted.class_name or cluster.storage_class))
    if wanted.ledger is not None:
        ledger = wanted.ledger
        claims.append(_claim(ctx, role, ledger_claim_name(job), ledger.size, ["ReadWriteOnce"], ledger.class_name))
    return RenderedRole(role.name, role.kind, role.hash, tuple(claims))


def _claim(
    ctx: RenderContext, role: RoleKey, name: str, size: str, modes: Sequence[str], class_name: str | None
) -> Object:
    """Return a claim. A retained claim has no owner, so deleting a job never deletes a trained model."""
    spec: dict[str, Any] = {"accessModes": [*modes], "resources": {"requests": {"storage": size}}}
    if class_name:
        spec["storageClassName"] = class_name
    return ctx.object(
        role,
        "PersistentVolumeClaim",
        name,
        {"spec": spec},
        owned=ctx.job.spec.storage.retention == "Delete",
        annotations={names.SPEC_HASH: ctx.inputs.lasting},
    )


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
