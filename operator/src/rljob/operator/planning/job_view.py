"""View of a job for one plan: its rendered roles, its pods by role, and functions that read single objects.

Renderings are cached: an idle job is planned repeatedly with the same rendering.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from rljob import manifests
from rljob.api.job_status import Attempt
from rljob.api.kubernetes import GangProvider
from rljob.api.models import RLJob
from rljob.manifests.gang import gang_provider
from rljob.manifests.inputs import Cluster, Flavor, RenderTarget
from rljob.manifests.names import ATTEMPT, RAY_CLUSTER, RESTARTS, ROLE, role_name
from rljob.manifests.render_context import RenderedRole
from rljob.operator.api_types import Child, ObjectCondition, OwnerReference, Pod
from rljob.operator.plan import Observed, Ref

WORKLOADS = frozenset({"Deployment", "StatefulSet", "Job", RAY_CLUSTER})
"""Kinds with pods."""
RETAINED_KINDS = frozenset({"PersistentVolumeClaim", "Secret"})
"""Kinds that only a user or the deletion of the job removes."""
MOST_RESTARTS = 1e6
DISRUPTED = "DisruptionTarget"
"""Condition of a pod that was terminated by a disruption: evicted, preempted, or on a lost node."""


@dataclass(frozen=True)
class JobView:
    """A job at one moment. ``pods``: role → its pods without those with a deletionTimestamp, without pods of other
    attempts of the trainer, and without those whose RayCluster is deleted."""

    observed: Observed
    job: RLJob
    attempt: Attempt
    roles: Sequence[RenderedRole]
    wanted: Mapping[str, int]
    pods: Mapping[str, Sequence[Pod]]
    gang: GangProvider = "none"
    """Gang provider of the job."""
    gives_back: bool = False
    """Elastic engines are removed, because a pod of the gang finds no resources: see :mod:`.starvation`."""

    @property
    def now(self) -> float:
        """Unix seconds."""
        return self.observed.now

    def role(self, kind: str) -> RenderedRole | None:
        """Return the role of a kind that has one role at most; None if the job has none."""
        return next((role for role in self.roles if role.kind == kind), None)

    def workloads(self, role: str) -> list[Child]:
        """Return the role's workloads, without those with a deletionTimestamp and those of other attempts."""
        number = self.attempt.number
        return [
            child
            for child in workloads(self.observed)
            if role_of(child) == role and _of_attempt(child.metadata.labels, number)
        ]


def observe(
    observed: Observed,
    job: RLJob,
    cluster: Cluster,
    attempt: Attempt,
    render: Render,
    flavors: Mapping[str, Flavor],
    gives_back: bool = False,
) -> JobView:
    """Return the view of a valid job. ``flavors``: role → nodes that Kueue assigned; ``gives_back``: see
    :class:`JobView`.

    Raises:
        ValueError: the job cannot be rendered; each line is an error.
    """
    wanted = wanted_replicas(job, {**_present_replicas(observed), **observed.scales})
    if gives_back:
        wanted |= {role_name("rollout", pool.name): pool.replicas.min for pool in job.spec.rollouts}
    meta = observed.metadata
    context = RenderTarget(
        cluster, meta.namespace, meta.uid, attempt.number, wanted, flavors, priority=observed.priority
    )
    roles = render(job, context)
    pods, gang = pods_by_role(_without_orphans(observed), attempt.number), gang_provider(job, cluster)
    return JobView(observed, job, attempt, roles, wanted, pods, gang, gives_back)


def _without_orphans(observed: Observed) -> list[Pod]:
    """Return the pods without those of deleted RayClusters, which the garbage collector has not deleted yet."""
    present = {child.metadata.uid for child in workloads(observed) if child.kind == RAY_CLUSTER}
    owners = ((pod, controller(pod)) for pod in observed.pods)
    return [pod for pod, owner in owners if owner is None or owner.kind != RAY_CLUSTER or owner.uid in present]


def wanted_replicas(job: RLJob, scales: Mapping[str, int]) -> dict[str, int]:
    """Return scalable role → desired pods: the replicas of its RLJobScale, limited to min and max."""
    spec = job.spec
    ranges = {
        **{role_name("rollout", pool.name): pool.replicas for pool in spec.rollouts},
        **{role_name("reward", reward.name): reward.replicas for reward in spec.rewards},
        **{role_name("environment", each.name): each.replicas for each in spec.environments},
        "runner": spec.runner.replicas,
    }
    return {
        role: max(replicas.min, min(scales.get(role, replicas.min), replicas.max or replicas.min))
        for role, replicas in ranges.items()
    }


def _present_replicas(observed: Observed) -> dict[str, int]:
    """Return role → replicas of its Deployments, or number of its RayClusters: the desired pods or engines while the
    role's RLJobScale is missing (it was deleted or has lost its label)."""
    found: dict[str, int] = {}
    for (kind, _), child in observed.children.items():
        if kind in ("Deployment", RAY_CLUSTER) and child.metadata.deletion_timestamp is None:
            replicas = 1 if kind == RAY_CLUSTER else int(child.body.get("spec", {}).get("replicas", 1))
            found[role_of(child)] = found.get(role_of(child), 0) + replicas
    return found


def least_replicas(job: RLJob) -> dict[str, int]:
    """Return scalable role → minimum number of pods with which it is ready."""
    return wanted_replicas(job, {})


def pods_by_role(pods: Sequence[Pod], attempt: int) -> dict[str, list[Pod]]:
    """Return role → its pods, by name; see :class:`JobView`."""
    found: dict[str, list[Pod]] = {}
    for pod in pods:
        meta = pod.metadata
        if meta.deletion_timestamp is None and _of_attempt(meta.labels, attempt):
            found.setdefault(meta.labels.get(ROLE, ""), []).append(pod)
    for each in found.values():
        each.sort(key=lambda pod: pod.metadata.name)
    return found


def _of_attempt(labels: Mapping[str, str], attempt: int) -> bool:
    return ATTEMPT not in labels or labels[ATTEMPT] == str(attempt)


def alive(pods: Sequence[Pod]) -> list[Pod]:
    """Return the pods that have not ended; evicted pods stay until they are deleted."""
    return [pod for pod in pods if pod.status.phase not in ("Failed", "Succeeded")]


def role_of(child: Child) -> str:
    """Return the role that a child belongs to."""
    return child.metadata.labels.get(ROLE, "")


def role_of_pod(pod: Pod) -> str:
    """Return the role that a pod belongs to."""
    return pod.metadata.labels.get(ROLE, "")


def workloads(observed: Observed) -> list[Child]:
    """Return the job's workloads without those with a deletionTimestamp, by kind and name."""
    return [
        observed.children[ref]
        for ref in sorted(observed.children)
        if ref[0] in WORKLOADS and observed.children[ref].metadata.deletion_timestamp is None
    ]


def restarts_before(cluster: Child) -> float:
    """Return the restarts that a RayCluster has taken over from those that it replaces; 0 if another client wrote
    something else there."""
    try:
        return max(0.0, min(float(cluster.metadata.annotations.get(RESTARTS, "0")), MOST_RESTARTS))
    except ValueError:
        return 0.0


def deletion(child: Child) -> tuple[Ref, str]:
    """Return the entry of Plan.deletions for a child."""
    return (child.kind, child.metadata.name), child.metadata.uid


def condition(child: Child, *types: str) -> dict[str, Any] | None:
    """Return the first of the child's conditions of these types that is true."""
    conditions = child.body.get("status", {}).get("conditions", ())
    return next((each for each in conditions if each.get("type") in types and each.get("status") == "True"), None)


def pod_condition(pod: Pod, kind: str) -> ObjectCondition | None:
    """Return a condition of a pod."""
    for each in pod.status.conditions:  # a loop: this runs several times per pod and plan
        if each.type == kind:
            return each
    return None


def controller(pod: Pod) -> OwnerReference | None:
    """Return the controller of a pod. None: a user created the pod, and it does not belong to the job."""
    return next((owner for owner in pod.metadata.owner_references if owner.controller), None)


def has_node(pod: Pod) -> bool:
    """Return whether a scheduler has found a node for a pod."""
    scheduled = pod_condition(pod, "PodScheduled")
    return scheduled is not None and scheduled.status == "True"


def is_ready(pod: Pod) -> bool:
    """Return whether a pod is ready."""
    found = pod_condition(pod, "Ready")
    return found is not None and found.status == "True"


def is_disrupted(pod: Pod) -> bool:
    """Return whether a pod was terminated by a disruption, or is about to be."""
    found = pod_condition(pod, DISRUPTED)
    return found is not None and found.status == "True"


Render: TypeAlias = Callable[[RLJob, RenderTarget], Sequence[RenderedRole]]
"""Job and context → its roles with their objects; ValueError when the job cannot be rendered."""


def render(job: RLJob, context: RenderTarget) -> Sequence[RenderedRole]:
    """Return the roles of a job.

    Raises:
        ValueError: no cluster supports a field that it sets; each line is an error.
    """
    problems = manifests.problems(job, context.cluster)
    if problems:
        raise ValueError("\n".join(problems))
    return manifests.render(job, context)


@dataclass(frozen=True)
class _Entry:
    job: RLJob
    context: RenderTarget
    roles: Sequence[RenderedRole]


class Rendering:
    """Caches the last rendering of each job while job (the same Python object) and context do not change."""

    def __init__(self, render: Render = render) -> None:
        self._render = render
        self._entries: dict[str, _Entry] = {}

    def __call__(self, job: RLJob, context: RenderTarget) -> Sequence[RenderedRole]:
        """Return the roles of ``job``; the result is shared and must not be changed."""
        entry = self._entries.get(context.uid)
        if entry is None or entry.job is not job or entry.context != context:
            entry = self._entries[context.uid] = _Entry(job, context, self._render(job, context))
        return entry.roles

    def forget(self, uid: str) -> None:
        """Drop the rendering of a deleted job."""
        self._entries.pop(uid, None)
