"""Roles that run as Deployments: reward services, the runner, pools of engines.

A reward with a url runs outside the job and has no objects. A pool has two Deployments: the minimum of engines, which
belongs to the gang, and the elastic engines that the RLJobScale requests in addition.
"""

from __future__ import annotations

import json
from typing import Any

from rljob.api.engine_registry import image_of
from rljob.api.pod_models import PORT, PORT_NAME
from rljob.api.roles import Replicas, Reward, Rollout
from rljob.manifests.coordinator import RESOURCES
from rljob.manifests.hashes import of_pods
from rljob.manifests.inputs import Object
from rljob.manifests.names import role_name
from rljob.manifests.pods import PodSettings, file_probes, http_probes, pod_template, service_url, socket_probes
from rljob.manifests.render_context import RenderContext, RenderedRole, RoleKey
from rljob.manifests.resources import ELASTIC, GANG, gang_affinity, lost_node_tolerations, resources, tier_label

PROGRESS_DEADLINE_SECONDS = 3600
"""Deadline for the progress of a Deployment. It is long because large models load slowly."""


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


def scale(ctx: RenderContext, role: RoleKey, replicas: Replicas) -> list[Object]:
    """Return the RLJobScale of a role with max > min. Its replicas are an initial value that autoscalers change."""
    if replicas.max is None or replicas.max <= replicas.min:
        return []
    body = {"spec": {"job": ctx.job.metadata.name, "role": role.name, "replicas": replicas.min}}
    api = ctx.job.api_version
    return [ctx.object(role, "RLJobScale", ctx.name(role.name), body, api=api)]


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


def reward(ctx: RenderContext, service: Reward) -> RenderedRole | None:
    """Return the role of a reward; None if it runs outside the job."""
    if service.url is not None:
        return None
    role = ctx.role_key("reward", service.name, own=service.template)
    name = ctx.name(role.name)
    replicas = replicas_of(ctx, role, service.replicas)
    ports = [{"name": PORT_NAME, "port": PORT, "targetPort": PORT, "protocol": "TCP"}]
    service_spec = {"selector": ctx.selector(role), "ports": ports}
    objects = (
        ctx.object(role, "Service", name, {"spec": service_spec}),  # for runners of older releases, and for users
        ctx.object(role, "Service", _replicas_name(ctx, service), {"spec": {**service_spec, "clusterIP": "None"}}),
        deployment(ctx, role, name, replicas, pod_template(ctx, _reward_pod(ctx, role, service))),
        disruption_budget(ctx, role),
        *scale(ctx, role, service.replicas),
    )
    return RenderedRole(role.name, role.kind, role.hash, objects, desired=replicas)


def reward_url(ctx: RenderContext, service: Reward) -> str:
    """Return the address of a reward. Inside the job its name stands for all ready pods: the runner chooses one."""
    return service.url or service_url(ctx, _replicas_name(ctx, service))


def _replicas_name(ctx: RenderContext, service: Reward) -> str:
    return ctx.name("replicas", role_name("reward", service.name))


def _reward_pod(ctx: RenderContext, role: RoleKey, service: Reward) -> PodSettings:
    hang_seconds = ctx.job.spec.failure_policy.hang_seconds
    by_rljob = service.served_by_rljob
    return PodSettings(
        role,
        image="rewards" if by_rljob else "",
        command=["python", "-m", "rljob.rewards.main"] if by_rljob else (),
        variables={"RLJOB_NAME": service.name},
        tokens={"RLJOB_TOKEN_FILE": "reward"},
        writes=False,
        serves=True,
        probes=http_probes(hang_seconds) if by_rljob else socket_probes(),
        resources=RESOURCES if by_rljob else {},
        template=service.template,
    )


def _environment_urls(ctx: RenderContext) -> dict[str, str]:
    """Return the variable with the addresses of environments; none without environments, as in earlier versions."""
    urls = {entry.name: entry.url for entry in ctx.job.spec.environments if entry.url is not None}
    return {"RLJOB_ENVIRONMENT_URLS": json.dumps(urls)} if urls else {}


def runner(ctx: RenderContext) -> RenderedRole:
    """Return the runner's role."""
    spec = ctx.job.spec
    role = ctx.role_key("runner", own=spec.runner.template, reads_models=True)
    replicas = replicas_of(ctx, role, spec.runner.replicas)
    pod = PodSettings(
        role,
        image="runner",
        command=["python", "-m", "rljob.runner.main"],
        variables={
            "RLJOB_REWARD_URLS": json.dumps({entry.name: reward_url(ctx, entry) for entry in spec.rewards}),
            **_environment_urls(ctx),
        },
        tokens={"RLJOB_TOKEN_FILE": "runner", "RLJOB_REWARD_TOKEN_FILE": "reward"},
        reads_models=True,
        probes=file_probes(spec.failure_policy.hang_seconds),
        resources=RESOURCES,
        spec_fields={"tolerations": lost_node_tolerations()},
        template=spec.runner.template,
    )
    objects = (
        deployment(ctx, role, ctx.name(role.name), replicas, pod_template(ctx, pod)),
        *scale(ctx, role, spec.runner.replicas),
    )
    return RenderedRole(role.name, role.kind, role.hash, objects, desired=replicas)


def rollout(ctx: RenderContext, pool: Rollout) -> RenderedRole:
    """Return the role of a pool."""
    role = ctx.role_key("rollout", pool.name, own=of_pods(pool), reads_models=True)
    total = replicas_of(ctx, role, pool.replicas)
    minimum = min(total, pool.replicas.min)
    objects = [_pool_deployment(ctx, role, pool, GANG, minimum)]
    if pool.replicas.max is not None and pool.replicas.max > pool.replicas.min:
        objects.append(_pool_deployment(ctx, role, pool, ELASTIC, total - minimum))
    objects += [disruption_budget(ctx, role), *scale(ctx, role, pool.replicas)]
    return RenderedRole(role.name, role.kind, role.hash, tuple(objects), desired=total)


def _pool_deployment(ctx: RenderContext, role: RoleKey, pool: Rollout, which: str, replicas: int) -> Object:
    requested = resources(ctx, pool, pool.devices)
    pod = PodSettings(
        role,
        image=image_of(pool.engine),
        command=["python", "-m", "rljob.rollout.main"],
        variables={"RLJOB_NAME": pool.name, **requested.variables},
        tokens={"RLJOB_TOKEN_FILE": "agent"},
        volumes=requested.volumes,
        reads_models=True,
        probes=file_probes(ctx.job.spec.failure_policy.hang_seconds),
        resources=requested.resources,
        spec_fields={
            "tolerations": [*lost_node_tolerations(), *requested.tolerations],
            **requested.spec_fields,
            **gang_affinity(ctx, which),
        },
        labels=tier_label(which),
        template=pool.template,
    )
    name = ctx.name(role.name, *([ELASTIC] if which == ELASTIC else []))
    return deployment(ctx, role, name, replicas, pod_template(ctx, pod), tier_label(which))
