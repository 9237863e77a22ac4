"""A pool of engines: a Deployment of the least there shall be, and one of those beyond.

The first belongs to the gang. What the RLJobScale asks for beyond it comes and goes without it.
"""

from __future__ import annotations

from rljob.api.roles import Rollout
from rljob.manifests import probes
from rljob.manifests.context import Object, Role
from rljob.manifests.deployments import deployment, disruption_budget, replicas_of, scale
from rljob.manifests.gang import ELASTIC, GANG, near_the_gang, tier
from rljob.manifests.hardware import hardware, lost_node
from rljob.manifests.hashes import of_pods
from rljob.manifests.pods import Pod, pod_template
from rljob.manifests.scene import Identity, Scene


def rollout(scene: Scene, pool: Rollout) -> Role:
    """Return the role of a pool."""
    role = scene.identity("rollout", pool.name, own=of_pods(pool))
    total = replicas_of(scene, role, pool.replicas)
    least = min(total, pool.replicas.min)
    objects = [_deployment(scene, role, pool, GANG, least)]
    if pool.replicas.max is not None and pool.replicas.max > pool.replicas.min:
        objects.append(_deployment(scene, role, pool, ELASTIC, total - least))
    objects += [disruption_budget(scene, role), *scale(scene, role, pool.replicas)]
    return Role(role.name, role.kind, role.hash, tuple(objects), desired=total)


def _deployment(scene: Scene, role: Identity, pool: Rollout, which: str, replicas: int) -> Object:
    asked = hardware(scene, pool, _devices(pool))
    pod = Pod(
        role,
        image="rollout",
        command=["python", "-m", "rljob.rollout.main"],
        variables={"RLJOB_NAME": pool.name, **asked.variables},
        token="agent",
        volumes=asked.volumes,
        probes=probes.files(scene.job.spec.failure_policy.hang_seconds),
        resources=asked.resources,
        more={"tolerations": [*lost_node(), *asked.tolerations], **asked.more, **near_the_gang(scene, which)},
        labels=tier(which),
        template=pool.template,
    )
    name = scene.name(role.name, *([ELASTIC] if which == ELASTIC else []))
    return deployment(scene, role, name, replicas, pod_template(scene, pod), tier(which))


def _devices(pool: Rollout) -> int:
    """Return the accelerators of one pod."""
    cut = pool.parallelism
    return max(1, cut.tensor * cut.pipeline * cut.data // pool.hosts)
