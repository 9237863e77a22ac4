"""The gang of a job for each provider: what makes pods its members, and the object that describes it.

The gang consists of the trainer and the minimum of engines of each pool. Elastic engines are not members: a minimum
counts any member, so more members than the minimum could take the place of the trainer.

Contracts:
    kubernetes: PodGroup of scheduling.k8s.io/v1alpha2 (Kubernetes 1.36) or v1beta1 (1.37), with
        schedulingPolicy.gang.minCount; spec.schedulingGroup.podGroupName of pods. The spec of a PodGroup is immutable.
    volcano: PodGroup of scheduling.volcano.sh/v1beta1; schedulerName, annotations for the group and the task of pods.
    coscheduling: PodGroup of scheduling.x-k8s.io/v1alpha1 (scheduler-plugins), minMember; a label of pods.
    kueue: Workload of kueue.x-k8s.io/v1beta2, with a pod set for each role. The operator holds all pods back until it
        is admitted, and adds to the pods what the assigned ResourceFlavors demand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rljob.api.kubernetes import GangProvider
from rljob.api.models import RLJob
from rljob.manifests.hashes import digest
from rljob.manifests.inputs import Cluster, Flavor, Object
from rljob.manifests.names import DEMAND_HASH, TIER, gang_name
from rljob.manifests.pod_demands import demands
from rljob.manifests.pod_requests import total_requests
from rljob.manifests.render_context import RenderContext, RenderedRole, RoleKey

GANG = "gang"
ELASTIC = "elastic"
GROUP = "group"
"""Kind of the role of the object that describes the gang."""
WITH_POD_GROUP: Sequence[GangProvider] = ("kubernetes", "volcano", "coscheduling")
"""Providers that place the pods of the gang together. Their pods are created together."""
MOST_POD_SETS = 18
"""Limit of a Workload of Kueue."""
NATIVE_GROUP, NATIVE_VERSION = "scheduling.k8s.io", "v1alpha2"
VOLCANO_GROUP, VOLCANO_VERSION = "scheduling.volcano.sh", "v1beta1"
COSCHEDULING_GROUP, COSCHEDULING_VERSION = "scheduling.x-k8s.io", "v1alpha1"
KUEUE_GROUP, KUEUE_VERSION = "kueue.x-k8s.io", "v1beta2"


def tier_name(role: str, tier: str) -> list[str]:
    """Return the parts of the names of a pool's objects of one tier."""
    return [role, ELASTIC] if tier == ELASTIC else [role]


@dataclass(frozen=True)
class Membership:
    """What makes a pod a member of the gang, or makes its scheduler the one of the gang."""

    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    spec_fields: Mapping[str, Any] = field(default_factory=dict)


def gang_provider(job: RLJob, cluster: Cluster) -> GangProvider:
    """Return the gang provider of a job."""
    return job.spec.scheduling.gang.provider or cluster.gang


def membership(ctx: RenderContext, role: RoleKey, which: str) -> Membership:
    """Return the membership of pods of the trainer or of engines. ``which``: GANG, or ELASTIC for engines beyond the
    minimum: they have the same scheduler, because two schedulers would give the same accelerators away."""
    name, member = gang_name(ctx.job.metadata.name), which == GANG
    match gang_provider(ctx.job, ctx.cluster):
        case "kubernetes" if member:
            return Membership(spec_fields={"schedulingGroup": {"podGroupName": name}})
        case "volcano":
            queue = ctx.job.spec.scheduling.gang.queue
            task = {"scheduling.k8s.io/group-name": name, "volcano.sh/task-spec": role.name} if member else {}
            return Membership(
                annotations=task | ({"scheduling.volcano.sh/queue-name": queue} if queue else {}),
                spec_fields={"schedulerName": ctx.cluster.gang_scheduler or "volcano"},
            )
        case "coscheduling":
            scheduler = ctx.cluster.gang_scheduler
            return Membership(
                labels={"scheduling.x-k8s.io/pod-group": name} if member else {},
                spec_fields={"schedulerName": scheduler} if scheduler else {},
            )
    return Membership()


def group(ctx: RenderContext, roles: Sequence[RenderedRole]) -> RenderedRole | None:
    """Return the role of the object that describes the gang; None if the provider has none.

    Args:
        ctx: the job.
        roles: the other roles. For Kueue without flavors, which are its answer.
    """
    match gang_provider(ctx.job, ctx.cluster):
        case "kubernetes":
            spec: Object = {"schedulingPolicy": {"gang": {"minCount": _size(_members(roles))}}}
            return _role(ctx, "PodGroup", f"{NATIVE_GROUP}/{NATIVE_VERSION}", spec)
        case "volcano":
            return _role(ctx, "PodGroup", f"{VOLCANO_GROUP}/{VOLCANO_VERSION}", _volcano(ctx, _members(roles)))
        case "coscheduling":
            spec = {"minMember": _size(_members(roles))}
            return _role(ctx, "PodGroup", f"{COSCHEDULING_GROUP}/{COSCHEDULING_VERSION}", spec)
        case "kueue":
            return _workload(ctx, roles)
    return None


@dataclass(frozen=True)
class _PodSet:
    """Equal pods of a role."""

    role: str
    count: int
    template: Object


def _members(roles: Sequence[RenderedRole]) -> list[_PodSet]:
    """Return the members of the gang."""
    return [each for each in _pod_sets(roles) if each.template["metadata"]["labels"].get(TIER) == GANG]


def _pod_sets(roles: Sequence[RenderedRole]) -> list[_PodSet]:
    """Return the pods of all roles."""
    return [
        _PodSet(role.name, sum(count for _, count in made), made[0][0]) for role in roles for made in _by_tier(role)
    ]


def _by_tier(role: RenderedRole) -> list[list[tuple[Object, int]]]:
    """Return template and number of the pods of each object of a role, by the tier of the pods."""
    tiers: dict[str, list[tuple[Object, int]]] = {}
    for each in role.objects:
        template, count = pods_of(each)
        if count:
            tiers.setdefault(template["metadata"]["labels"].get(TIER, ""), []).append((template, count))
    return list(tiers.values())


def pods_of(rendered: Object) -> tuple[Object, int]:
    """Return template and number of the pods that an object demands; 0 if it has none. The hosts of an engine are
    counted as its head, because all have the same resources."""
    spec = rendered.get("spec") or {}
    if "headGroupSpec" in spec:  # a RayCluster
        return spec["headGroupSpec"]["template"], 1 + sum(each["replicas"] for each in spec["workerGroupSpecs"])
    if "template" not in spec:
        return {}, 0
    return spec["template"], int(spec.get("completions", spec.get("replicas", 1)))


def _size(members: Sequence[_PodSet]) -> int:
    return sum(each.count for each in members)


def _volcano(ctx: RenderContext, members: Sequence[_PodSet]) -> Object:
    scheduling = ctx.job.spec.scheduling
    spec: Object = {
        "minMember": _size(members),
        "minTaskMember": {each.role: each.count for each in members},
        "minResources": total_requests([(each.template, each.count) for each in members]),
    }
    if scheduling.gang.queue:
        spec["queue"] = scheduling.gang.queue
    if scheduling.priority_class_name:
        spec["priorityClassName"] = scheduling.priority_class_name
    return spec


def _workload(ctx: RenderContext, roles: Sequence[RenderedRole]) -> RenderedRole:
    """Return the role of a Workload.

    Its annotation DEMAND_HASH tells whether an admission still holds. It covers the number of pods and what the user
    wrote of their demands: a new release of the operator, or another setting of the cluster, must not take away the
    admission of a job that runs. The hash of the role covers everything: a Workload that waits is kept up to date.
    """
    pods, scheduling = _pod_sets(roles), ctx.job.spec.scheduling
    spec: Object = {
        "queueName": scheduling.gang.queue,
        "podSets": [{"name": each.role, "count": each.count, "template": _for_kueue(each.template)} for each in pods],
    }
    if scheduling.priority_class_name and ctx.target.priority is not None:
        spec["priority"] = ctx.target.priority
        spec["priorityClassRef"] = {
            "group": "scheduling.k8s.io",
            "kind": "PriorityClass",
            "name": scheduling.priority_class_name,
        }
    written = demands(ctx.job)
    demand = digest(scheduling.gang.queue, [[each.role, each.count, written.get(each.role)] for each in pods])
    labels = {"kueue.x-k8s.io/job-uid": ctx.target.uid} if ctx.target.uid else {}
    return _role(ctx, "Workload", f"{KUEUE_GROUP}/{KUEUE_VERSION}", spec, labels, {DEMAND_HASH: demand})


def _for_kueue(template: Object) -> Object:
    """Return a template with the metadata that a Workload may have."""
    metadata = {key: template["metadata"][key] for key in ("labels", "annotations") if key in template["metadata"]}
    return {"metadata": metadata, "spec": template["spec"]}


def _role(
    ctx: RenderContext,
    kind: str,
    api: str,
    spec: Object,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
) -> RenderedRole:
    # A hash of its own: its fields may change without a change of pods.
    key, name = RoleKey(GROUP, digest(kind, spec)), gang_name(ctx.job.metadata.name)
    made = ctx.object(key, kind, name, {"spec": spec}, api=api, labels=labels, annotations=annotations)
    return RenderedRole(key.name, key.kind, key.hash, (made,))


def with_flavor(template: Object, flavor: Flavor | None) -> Object:
    """Return a pod template with the node labels and tolerations of a flavor.

    Raises:
        ValueError: the template requires another value of a node label.
    """
    if flavor is None:
        return template
    spec = template["spec"]
    selector = dict(spec.get("nodeSelector") or {})
    for key, value in flavor.node_labels.items():
        if selector.setdefault(key, value) != value:
            raise ValueError(
                f"Kueue assigns nodes with {key}={value}, and the pod's nodeSelector demands {selector[key]}; remove "
                "it from the template or the accelerator profile, or use another queue"
            )
    tolerations = [*(spec.get("tolerations") or ())]
    tolerations += [dict(each) for each in flavor.tolerations if dict(each) not in tolerations]
    more: Object = ({"nodeSelector": selector} if selector else {}) | (
        {"tolerations": tolerations} if tolerations else {}
    )
    return {**template, "spec": {**spec, **more}}
