"""The job's Secret with the tokens of its components. Created once; never read, listed or changed."""

from __future__ import annotations

import json
import secrets

from rljob.api.models import RLJob
from rljob.manifests import ALL_TOKENS, CLIENT_ROLES, TOKEN_ROLES, secret
from rljob.manifests.inputs import Object, RenderTarget
from rljob.operator.api_types import Meta


def new_secret(meta: Meta, job: RLJob) -> Object:
    """Return a Secret with new tokens. Its name contains the job's uid, so a later job of the same name has its own."""
    tokens = {role: secrets.token_urlsafe(32) for role in TOKEN_ROLES}
    context = RenderTarget(namespace=meta.namespace, uid=meta.uid)
    of_clients = {role: tokens[role] for role in CLIENT_ROLES}
    return secret(job, context, {**tokens, ALL_TOKENS: json.dumps(of_clients)})
