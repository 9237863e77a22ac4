"""The manifest as the job's parts read it, in a ConfigMap."""

from __future__ import annotations

from rljob.manifests.context import Role
from rljob.manifests.job_config import KEY, job_json
from rljob.manifests.scene import Scene


def config(scene: Scene) -> Role:
    """Return the role of the job's configuration."""
    role = scene.identity("config", own=scene.inputs.parts)
    data = {"data": {KEY: job_json(scene.job, scene.inputs)}}
    return Role(role.name, role.kind, role.hash, (scene.object(role, "ConfigMap", scene.name("job"), data),))
