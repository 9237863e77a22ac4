"""Roles that run as Deployments: services of rewards and environments, the runner, pools of engines.

A service with a url runs outside the job and has no objects. A pool has two Deployments: the minimum of engines, which
belongs to the gang, and the elastic engines that the RLJobScale requests in addition. If an engine spans hosts, the
pool has a RayCluster for each engine instead (:mod:`rljob.manifests.ray_clusters`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rljob.api.autoscaling import Replicas
from rljob.api.engine_registry import image_of
from rljob.api.pod_models import PORT, PORT_NAME
from rljob.api.roles import Environment, Reward, Rollout
from rljob.manifests.coordinator import RESOURCES
from rljob.manifests.gang import ELASTIC, GANG, membership, tier_name
from rljob.manifests.hashes import digest, of_pods
from rljob.manifests.inputs import Object
from rljob.manifests.names import role_name
from rljob.manifests.pods import PodSettings, file_probes, http_probes, pod_template, service_url, socket_probes
from rljob.manifests.ray_clusters import HEAD, NODE_TYPE, ray_cluster
from rljob.manifests.render_context import RenderContext, RenderedRole, RoleKey
from rljob.manifests.replica_scale import scale
from rljob.manifests.resources import gang_affinity, lost_node_tolerations, resources, tier_label

PROGRESS_DEADLINE_SECONDS = 3600
"""Deadline for the progress of a Deployment. It is long because large models load slowly."""


@dataclass(frozen=True)
class ServiceKind:
    """A kind of services that the runner calls.

    ``role``: kind of its roles, and key of the Secret with its token. ``image``: component whose image has rljob's own
    service. ``program``: module of that service.
    """

    role: str
    image: str
    program: str


POOL_TOKEN = "pool"
"""Key of the Secret with the token of the engines of frozen pools."""
REWARD = ServiceKind("reward", "rewards", "rljob.rewards.main")
ENVIRONMENT = ServiceKind("environment", "environments", "rljob.environments.main")


def replicas_of(ctx: RenderContext, role: RoleKey, replicas: Replicas) -> int:
    """Return the desired pods of a role."""
    return ctx.target.replicas.get(role.name, replicas.min)


def deployment(
    ctx: RenderContext,
    role: RoleKey,
    name: str,
    replicas: int,
    template: Object,
    extra_labels: dict[str, str] | None = None,
) -> Object:
    """Return a Deployment. ``extra_labels`` distinguish its pods from those of another Deployment of the role."""
    spec = {
        "replicas": replicas,
        "revisionHistoryLimit": 1,
        "progressDeadlineSeconds": PROGRESS_DEADLINE_SECONDS,
        # No surge: there may be no accelerator or quota for an additional pod.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": "25%"}},
        "selector": {"matchLabels": ctx.selector(role) | (extra_labels or {})},
        "template": template,
    }
    return ctx.object(role, "Deployment", name, {"spec": spec}, api="apps/v1", labels=extra_labels)


def disruption_budget(ctx: RenderContext, role: RoleKey, min_available: int | None = None) -> Object:
    """Return a PodDisruptionBudget with maxUnavailable 1: a drain evicts one pod at a time.

    With ``min_available`` this number of pods must remain available. Pods of a Job need this form, because Kubernetes
    does not know their desired number and would refuse every eviction.
    """
    bound = {"maxUnavailable": 1} if min_available is None else {"minAvailable": min_available}
    body: dict[str, Any] = {
        "spec": {
            **bound,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": ctx.selector(role)},
        }
    }
    return ctx.object(role, "PodDisruptionBudget", ctx.name(role.name), body, api="policy/v1")


def service(ctx: RenderContext, kind: ServiceKind, entry: Reward | Environment) -> RenderedRole | None:
    """Return the role of a reward or an environment; None if it runs outside the job."""
    if entry.url is not None:
        return None
    role = ctx.role_key(kind.role, entry.name, own=entry.template)
    name = ctx.name(role.name)
    replicas = replicas_of(ctx, role, entry.replicas)
    headless = _service_of(ctx, role, _replicas_name(ctx, kind, entry), {"clusterIP": "None"})
    objects = (
        _service_of(ctx, role, name),  # for runners of older releases, and for users
        headless,
        deployment(ctx, role, name, replicas, pod_template(ctx, _service_pod(ctx, role, kind, entry))),
        disruption_budget(ctx, role),
        *scale(ctx, role, entry.replicas, entry.autoscaling, entry.target_in_flight),
    )
    return RenderedRole(role.name, role.kind, role.hash, objects, desired=replicas)


def _service_of(
    ctx: RenderContext,
    role: RoleKey,
    name: str,
    fields: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
) -> Object:
    """Return a Service of the ready pods of a role; of those with ``labels``, if given."""
    ports = [{"name": PORT_NAME, "port": PORT, "targetPort": PORT, "protocol": "TCP"}]
    selector = {**ctx.selector(role), **(labels or {})}
    return ctx.object(role, "Service", name, {"spec": {"selector": selector, "ports": ports, **(fields or {})}})


def _replicas_name(ctx: RenderContext, kind: ServiceKind, entry: Reward | Environment) -> str:
    return ctx.name("replicas", role_name(kind.role, entry.name))


def _service_pod(ctx: RenderContext, role: RoleKey, kind: ServiceKind, entry: Reward | Environment) -> PodSettings:
    hang_seconds = ctx.job.spec.failure_policy.hang_seconds
    by_rljob = entry.served_by_rljob
    variables, tokens = {"RLJOB_NAME": entry.name}, {"RLJOB_TOKEN_FILE": kind.role}
    if kind is REWARD and (pools := ctx.job.spec.frozen_pools):  # the Secret of an older release has no such token
        services = {pool.name: ctx.name(role_name("rollout", pool.name)) for pool in pools}
        variables["RLJOB_POOL_URLS"] = _pool_urls(ctx, services)
        tokens["RLJOB_POOL_TOKEN_FILE"] = POOL_TOKEN
    return PodSettings(
        role,
        image=kind.image if by_rljob else "",
        command=["python", "-m", kind.program] if by_rljob else (),
        variables=variables,
        tokens=tokens,
        writes=False,
        serves=True,
        probes=http_probes(hang_seconds) if by_rljob else socket_probes(),
        resources=RESOURCES if by_rljob else {},
        template=entry.template,
    )


def _urls(ctx: RenderContext, kind: ServiceKind, entries: Sequence[Reward | Environment]) -> str:
    """Return JSON of name → address. Inside the job a name stands for all ready pods: the runner chooses one."""
    return json.dumps({each.name: each.url or service_url(ctx, _replicas_name(ctx, kind, each)) for each in entries})


def _pool_urls(ctx: RenderContext, services: Mapping[str, str]) -> str:
    """Return JSON of frozen pool → addresses, of the names of their Services."""
    return json.dumps({pool: [service_url(ctx, name)] for pool, name in services.items()})


def _pool_replicas(ctx: RenderContext, pool: Rollout) -> str:
    """Return the name of the Service that stands for all ready engines of a frozen pool: the runner chooses one."""
    return ctx.name("replicas", role_name("rollout", pool.name))


def runner(ctx: RenderContext) -> RenderedRole:
    """Return the runner's role."""
    spec = ctx.job.spec
    role = ctx.role_key("runner", own=spec.runner.template, reads_models=True)
    replicas = replicas_of(ctx, role, spec.runner.replicas)
    variables = {"RLJOB_REWARD_URLS": _urls(ctx, REWARD, spec.rewards)}
    tokens = {"RLJOB_TOKEN_FILE": "runner", "RLJOB_REWARD_TOKEN_FILE": REWARD.role}
    if spec.environments:
        variables["RLJOB_ENVIRONMENT_URLS"] = _urls(ctx, ENVIRONMENT, spec.environments)
    if any(entry.url is None for entry in spec.environments):  # the Secret of an older release has no such token
        tokens["RLJOB_ENVIRONMENT_TOKEN_FILE"] = ENVIRONMENT.role
    if pools := spec.frozen_pools:  # likewise
        variables["RLJOB_POOL_URLS"] = _pool_urls(ctx, {pool.name: _pool_replicas(ctx, pool) for pool in pools})
        tokens["RLJOB_POOL_TOKEN_FILE"] = POOL_TOKEN
    pod = PodSettings(
        role,
        image="runner",
        command=["python", "-m", "rljob.runner.main"],
        variables=variables,
        tokens=tokens,
        reads_models=True,
        probes=file_probes(spec.failure_policy.hang_seconds),
        resources=RESOURCES,
        spec_fields={"tolerations": lost_node_tolerations()},
        template=spec.runner.template,
    )
    objects = (
        deployment(ctx, role, ctx.name(role.name), replicas, pod_template(ctx, pod)),
        *scale(ctx, role, spec.runner.replicas, spec.runner.autoscaling, spec.runner.target_in_flight),
    )
    return RenderedRole(role.name, role.kind, role.hash, objects, desired=replicas)


def rollout(ctx: RenderContext, pool: Rollout) -> RenderedRole:
    """Return the role of a pool. It has a Deployment for each tier of its engines, or, if an engine spans hosts, a
    RayCluster for each engine."""
    role = ctx.role_key("rollout", pool.name, own=of_pods(pool), reads_models=True)
    total = replicas_of(ctx, role, pool.replicas)
    minimum = min(total, pool.replicas.min)
    of_tier = _pool_deployment if pool.hosts == 1 else _pool_ray_clusters
    objects = of_tier(ctx, role, pool, GANG, minimum)
    if pool.replicas.max is not None and pool.replicas.max > pool.replicas.min:
        objects += of_tier(ctx, role, pool, ELASTIC, total - minimum)
    if pool.frozen:
        of_head = {NODE_TYPE: HEAD} if pool.hosts > 1 else {}
        headless = _service_of(ctx, role, _pool_replicas(ctx, pool), {"clusterIP": "None"}, of_head)
        objects = [_service_of(ctx, role, ctx.name(role.name), labels=of_head), headless, *objects]
    budget = disruption_budget(ctx, role) if pool.hosts == 1 else _host_budget(ctx, role, pool, total)
    objects += [budget, *scale(ctx, role, pool.replicas, pool.autoscaling, target=1)]
    return RenderedRole(role.name, role.kind, role.hash, tuple(objects), desired=total, hosts=pool.hosts)


def _host_budget(ctx: RenderContext, role: RoleKey, pool: Rollout, engines: int) -> Object:
    """Return the disruption budget of engines that span hosts: one pod at a time, like that of other engines.

    Kubernetes does not know the desired number of such pods. A hash of its own: the number changes with the replicas.
    """
    least = engines * pool.hosts - 1
    return disruption_budget(ctx, RoleKey(role.kind, digest("PodDisruptionBudget", least), role.entry), least)


def _pool_ray_clusters(ctx: RenderContext, role: RoleKey, pool: Rollout, which: str, engines: int) -> list[Object]:
    """Return a RayCluster for each engine of a tier. The operator gives the names of those that replace others."""
    pod, base = _pool_pod(ctx, role, pool, which), tier_name(role.name, which)
    return [
        ray_cluster(ctx, role, pool, ctx.name(*base, str(number)), pod, tier_label(which)) for number in range(engines)
    ]


def _pool_pod(ctx: RenderContext, role: RoleKey, pool: Rollout, which: str) -> PodSettings:
    """Return the settings of a pod with an engine."""
    requested, member = resources(ctx, pool, pool.devices), membership(ctx, role, which)
    return PodSettings(
        role,
        image=image_of(pool.engine),
        command=["python", "-m", "rljob.rollout.main"],
        variables={"RLJOB_NAME": pool.name, **requested.variables},
        tokens={"RLJOB_TOKEN_FILE": POOL_TOKEN if pool.frozen else "agent"},
        serves=pool.frozen,
        volumes=requested.volumes,
        reads_models=True,
        probes=file_probes(ctx.job.spec.failure_policy.hang_seconds),
        resources=requested.resources,
        spec_fields={
            "tolerations": [*lost_node_tolerations(), *requested.tolerations],
            **requested.spec_fields,
            **gang_affinity(ctx, which),
            **member.spec_fields,
        },
        labels={**tier_label(which), **member.labels},
        annotations=member.annotations,
        template=pool.template,
        inherited=requested.template,
    )


def _pool_deployment(ctx: RenderContext, role: RoleKey, pool: Rollout, which: str, replicas: int) -> list[Object]:
    template = pod_template(ctx, _pool_pod(ctx, role, pool, which))
    return [deployment(ctx, role, ctx.name(*tier_name(role.name, which)), replicas, template, tier_label(which))]
