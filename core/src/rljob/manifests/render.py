"""Renders the Kubernetes objects of a job, as JSON and as YAML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import yaml

from rljob.api.models import RLJob
from rljob.api.text_escape import escape_block
from rljob.api.yaml_loader import Dumper
from rljob.manifests.coordinator import access, coordinator
from rljob.manifests.deployments import ENVIRONMENT, REWARD, rollout, runner, service
from rljob.manifests.gang import group
from rljob.manifests.hashes import Inputs
from rljob.manifests.inputs import Object, RenderTarget
from rljob.manifests.job_objects import config, storage
from rljob.manifests.jobs import initializer, trainer
from rljob.manifests.names import secret_name
from rljob.manifests.network import network
from rljob.manifests.render_context import RenderContext, RenderedRole, RoleKey

TOKEN_ROLES = ("trainer", "agent", "runner", "reward", "environment", "pool", "ray")
"""Roles with their own token. Each role is a key of the Secret; a pod mounts its own key, a runner also ``reward`` and
``environment``, and a reward also ``pool``: the tokens that they send to these services. ``ray``: of the connections of
Ray inside an engine that spans hosts."""
ALL_TOKENS = "coordinator"
"""Key of the Secret: JSON of role → token, for the coordinator, of the roles that connect to it."""
CLIENT_ROLES = ("trainer", "agent", "runner")
"""Roles that connect to the coordinator."""


def render(job: RLJob, target: RenderTarget) -> tuple[RenderedRole, ...]:
    """Return the roles of a job with their objects, in order of creation. Callers must not modify the objects.

    The Secret of the tokens is separate, because tokens are random: see :func:`secret`.

    Args:
        job: the user's job, not resolved, without :func:`~rljob.manifests.problems.problems`.
        target: cluster settings, namespace, UID, attempt, replicas, flavors.

    Raises:
        ValueError: a template contradicts a flavor.
    """
    ctx = RenderContext(job, target, Inputs(job))
    roles = _roles(ctx)
    requested = _roles(replace(ctx, target=replace(target, flavors={}))) if target.flavors else roles
    described = group(ctx, requested)
    return tuple(roles) if described is None else (described, *roles)


def _roles(ctx: RenderContext) -> list[RenderedRole]:
    spec = ctx.job.spec
    roles = [
        storage(ctx),
        config(ctx),
        access(ctx),
        network(ctx),
        initializer(ctx),
        coordinator(ctx),
        *(service(ctx, REWARD, entry) for entry in spec.rewards),
        *(service(ctx, ENVIRONMENT, entry) for entry in spec.environments),
        runner(ctx),
        trainer(ctx),
        *(rollout(ctx, pool) for pool in spec.rollouts),
    ]
    return [role for role in roles if role is not None]


def secret(job: RLJob, target: RenderTarget, data: Mapping[str, str]) -> Object:
    """Return the Secret of a job's tokens.

    Args:
        job: the job.
        target: namespace and UID of the job.
        data: key → value: the token of each role in :data:`TOKEN_ROLES`, and the value of :data:`ALL_TOKENS`.
    """
    assert data.keys() == {*TOKEN_ROLES, ALL_TOKENS}
    role = RoleKey("tokens", "")
    body = {"type": "Opaque", "immutable": True, "stringData": dict(data)}
    ctx = RenderContext(job, target, Inputs(job))
    return ctx.object(role, "Secret", secret_name(job.metadata.name, target.uid), body)


class _BlockDumper(Dumper):
    """Writes multi-line text in block style."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_BlockDumper.add_representer(str, _represent_text)


def to_yaml(objects: Iterable[Object]) -> str:
    """Return one YAML document per object, for kubectl and for reading."""
    text = yaml.dump_all(
        objects, Dumper=_BlockDumper, sort_keys=False, allow_unicode=True, width=120, explicit_start=True
    )
    return escape_block(text)
