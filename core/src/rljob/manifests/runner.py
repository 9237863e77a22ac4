"""The runner: a Deployment that nobody dials."""

from __future__ import annotations

import json

from rljob.manifests import probes
from rljob.manifests.context import Role
from rljob.manifests.coordinator import RESOURCES
from rljob.manifests.deployments import deployment, replicas_of, scale
from rljob.manifests.hardware import lost_node
from rljob.manifests.pods import Pod, pod_template
from rljob.manifests.reward import url
from rljob.manifests.scene import Scene


def runner(scene: Scene) -> Role:
    """Return the runner's role."""
    spec = scene.job.spec
    role = scene.identity("runner", own=spec.runner.template)
    replicas = replicas_of(scene, role, spec.runner.replicas)
    pod = Pod(
        role,
        image="runner",
        command=["python", "-m", "rljob.runner.main"],
        variables={"RLJOB_REWARD_URLS": json.dumps({entry.name: url(scene, entry) for entry in spec.rewards})},
        token="runner",
        probes=probes.files(spec.failure_policy.hang_seconds),
        resources=RESOURCES,
        more={"tolerations": lost_node()},
        template=spec.runner.template,
    )
    objects = (
        deployment(scene, role, scene.name(role.name), replicas, pod_template(scene, pod)),
        *scale(scene, role, spec.runner.replicas),
    )
    return Role(role.name, role.kind, role.hash, objects, desired=replicas)
