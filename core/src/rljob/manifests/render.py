"""A job's Kubernetes objects."""

from __future__ import annotations

from collections.abc import Mapping

from rljob.api.models import RLJob
from rljob.manifests.access import access
from rljob.manifests.config import config
from rljob.manifests.context import Context, Object, Role
from rljob.manifests.coordinator import coordinator
from rljob.manifests.hashes import Inputs
from rljob.manifests.initializer import initializer
from rljob.manifests.names import secret_name
from rljob.manifests.network import network
from rljob.manifests.reward import reward
from rljob.manifests.rollout import rollout
from rljob.manifests.runner import runner
from rljob.manifests.scene import Identity, Scene
from rljob.manifests.storage import storage
from rljob.manifests.trainer import trainer

TOKEN_ROLES = ("trainer", "agent", "runner")
"""Who has a token of their own. Each is a key of the Secret, which pods mount one of."""
ALL_TOKENS = "coordinator"
"""Key of the Secret: JSON of role → token, for the coordinator."""


def render(job: RLJob, context: Context) -> tuple[Role, ...]:
    """Return the roles of a job with their objects, in the order in which they are made. Objects are not to be changed.

    The Secret of its tokens is not among them, as they are random: see :func:`secret`.

    Args:
        job: as the user wrote it, not resolved, without :func:`~rljob.manifests.problems.problems`.
        context: where and when.
    """
    scene = Scene(job, context, Inputs(job))
    spec = job.spec
    roles = [
        storage(scene),
        config(scene),
        access(scene),
        network(scene),
        initializer(scene),
        coordinator(scene),
        *(reward(scene, entry) for entry in spec.rewards),
        runner(scene),
        trainer(scene),
        *(rollout(scene, pool) for pool in spec.rollouts),
    ]
    return tuple(role for role in roles if role is not None)


def secret(job: RLJob, context: Context, data: Mapping[str, str]) -> Object:
    """Return the Secret of a job's tokens.

    Args:
        job: the job.
        context: where it is.
        data: token of each of :data:`TOKEN_ROLES`, and :data:`ALL_TOKENS`.
    """
    assert data.keys() == {*TOKEN_ROLES, ALL_TOKENS}
    role = Identity("tokens", "")
    body = {"type": "Opaque", "immutable": True, "stringData": dict(data)}
    scene = Scene(job, context, Inputs(job))
    return scene.object(role, "Secret", secret_name(job.metadata.name, context.uid), body)
