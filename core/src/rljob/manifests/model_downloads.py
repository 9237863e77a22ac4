"""What pods need to download remote models and to copy checkpoints: a directory, addresses, credentials."""

from __future__ import annotations

from typing import Any

from rljob.manifests.render_context import RenderContext, Volume
from rljob.protocol.model_cache import MODEL_CACHE, endpoint_variables

STORAGE_DIRECTORY = "/var/lib/rljob"
CACHE_DIRECTORY = "/var/cache/rljob"
VOLUME = "rljob-models"
CREDENTIALS = ("HF_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION")
"""Keys of the Secret in spec.downloads.secret, and the variables that they become."""


def model_volumes(ctx: RenderContext) -> list[Volume]:
    """Return the volume of downloaded models, unless they are in the job's storage."""
    downloads = ctx.job.spec.downloads
    if not ctx.downloads_models or not (downloads.claim or downloads.empty_dir):
        return []
    claim = {"persistentVolumeClaim": {"claimName": downloads.claim}}
    return [({"name": VOLUME, **(claim if downloads.claim else {"emptyDir": {}})}, CACHE_DIRECTORY)]


def model_variables(ctx: RenderContext) -> dict[str, str]:
    """Return the variables that name the directory of downloaded models and the servers."""
    if not ctx.downloads_models:
        return {}
    directory = CACHE_DIRECTORY if model_volumes(ctx) else f"{STORAGE_DIRECTORY}/models"
    return {MODEL_CACHE: directory, **endpoint_variables(ctx.job.spec.downloads)}


def copy_variables(ctx: RenderContext) -> dict[str, str]:
    """Return the variables that name the servers to which checkpoints are copied."""
    return endpoint_variables(ctx.job.spec.downloads) if ctx.copies_checkpoints else {}


def credentials(ctx: RenderContext) -> list[dict[str, Any]]:
    """Return the variables that come from the Secret; a key that it does not have sets none."""
    secret = ctx.job.spec.downloads.secret
    if secret is None:
        return []
    return [
        {"name": key, "valueFrom": {"secretKeyRef": {"name": secret, "key": key, "optional": True}}}
        for key in CREDENTIALS
    ]
