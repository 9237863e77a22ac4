"""A reward service: a Deployment behind a Service. One with a url runs elsewhere and has no objects."""

from __future__ import annotations

from rljob.api.pods import PORT, PORT_NAME
from rljob.api.roles import Reward
from rljob.manifests import probes
from rljob.manifests.context import Role
from rljob.manifests.coordinator import RESOURCES
from rljob.manifests.deployments import deployment, disruption_budget, replicas_of, scale
from rljob.manifests.names import role_name
from rljob.manifests.pods import Pod, pod_template, service_url
from rljob.manifests.scene import Identity, Scene


def reward(scene: Scene, service: Reward) -> Role | None:
    """Return the role of a reward, if the job runs it."""
    if service.url is not None:
        return None
    role = scene.identity("reward", service.name, own=service.template)
    name = scene.name(role.name)
    replicas = replicas_of(scene, role, service.replicas)
    ports = [{"name": PORT_NAME, "port": PORT, "targetPort": PORT, "protocol": "TCP"}]
    objects = (
        scene.object(role, "Service", name, {"spec": {"selector": scene.selector(role), "ports": ports}}),
        deployment(scene, role, name, replicas, pod_template(scene, _pod(scene, role, service))),
        disruption_budget(scene, role),
        *scale(scene, role, service.replicas),
    )
    return Role(role.name, role.kind, role.hash, objects, desired=replicas)


def url(scene: Scene, service: Reward) -> str:
    """Return the address of a reward."""
    return service.url or service_url(scene, scene.name(role_name("reward", service.name)))


def _pod(scene: Scene, role: Identity, service: Reward) -> Pod:
    hang_seconds = scene.job.spec.failure_policy.hang_seconds
    ours = service.builtin is not None
    return Pod(
        role,
        image="rewards" if ours else "",
        command=["python", "-m", "rljob.rewards.main"] if ours else (),
        variables={"RLJOB_NAME": service.name},
        writes=False,
        serves=True,
        probes=probes.http(hang_seconds) if ours else probes.socket(),
        resources=RESOURCES if ours else {},
        template=service.template,
    )
