"""What is observed of a job, put in the order that decisions ask for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rljob.api.models import RLJob
from rljob.api.status import Attempt
from rljob.manifests.inputs import Cluster, Context
from rljob.manifests.names import ATTEMPT, ROLE, role_name
from rljob.manifests.render_context import RenderedRole
from rljob.operator.plan import Observed, Ref
from rljob.operator.planning.rendering import Render
from rljob.operator.seen import Child, ObjectCondition, OwnerReference, Pod

WORKLOADS = frozenset({"Deployment", "StatefulSet", "Job"})
"""Kinds that have pods."""
KEPT = frozenset({"PersistentVolumeClaim", "Secret"})
"""Kinds that only a person, or the job's own deletion, removes."""
GPU_KINDS = frozenset({"trainer", "rollout"})
SERVICES = frozenset({"coordinator", "reward", "runner"})
"""Kinds of roles whose pods need no accelerator."""
DISRUPTED = "DisruptionTarget"
"""Condition of a pod that something outside ended: an eviction, a preemption, a lost node."""


@dataclass(frozen=True)
class Scene:
    """A job at one moment. ``pods``: role → its pods that count: none that is being deleted, the trainer's of the
    present attempt alone."""

    observed: Observed
    job: RLJob
    attempt: Attempt
    roles: Sequence[RenderedRole]
    wanted: Mapping[str, int]
    pods: Mapping[str, Sequence[Pod]]

    @property
    def now(self) -> float:
        """Unix seconds."""
        return self.observed.now

    def role(self, kind: str) -> RenderedRole | None:
        """Return the only role of a kind, if the job has it."""
        return next((role for role in self.roles if role.kind == kind), None)

    def workloads(self, role: str) -> list[Child]:
        """Return the objects that have the role's pods: none that is being deleted, none of another attempt."""
        number = self.attempt.number
        return [
            child
            for child in workloads(self.observed)
            if role_of(child) == role and _of_attempt(child.metadata.labels, number)
        ]


def look(observed: Observed, job: RLJob, cluster: Cluster, attempt: Attempt, render: Render) -> Scene:
    """Return the scene of a valid job.

    Raises:
        ValueError: the job cannot be rendered; each line is a sentence.
    """
    wanted = wanted_replicas(job, {**_there(observed), **observed.scales})
    meta = observed.metadata
    context = Context(cluster, meta.namespace, meta.uid, attempt.number, wanted)
    roles = render(job, context)
    return Scene(observed, job, attempt, roles, wanted, pods_by_role(observed.pods, attempt.number))


def wanted_replicas(job: RLJob, scales: Mapping[str, int]) -> dict[str, int]:
    """Return for each role that can be scaled the pods there shall be: what its scale asks for, between min and max."""
    spec = job.spec
    ranges = {
        **{role_name("rollout", pool.name): pool.replicas for pool in spec.rollouts},
        **{role_name("reward", reward.name): reward.replicas for reward in spec.rewards},
        "runner": spec.runner.replicas,
    }
    return {
        role: max(replicas.min, min(scales.get(role, replicas.min), replicas.max or replicas.min))
        for role, replicas in ranges.items()
    }


def _there(observed: Observed) -> dict[str, int]:
    """Return role → pods that its Deployments ask for now: what is wanted while the role's scale is not to be seen, as
    somebody has deleted it or taken its label away."""
    found: dict[str, int] = {}
    for (kind, _), child in observed.children.items():
        if kind == "Deployment" and child.metadata.deletion_timestamp is None:
            replicas = int(child.body.get("spec", {}).get("replicas", 1))
            found[role_of(child)] = found.get(role_of(child), 0) + replicas
    return found


def least_replicas(job: RLJob) -> dict[str, int]:
    """Return for each role that can be scaled the pods without which it is not ready."""
    return wanted_replicas(job, {})


def pods_by_role(pods: Sequence[Pod], attempt: int) -> dict[str, list[Pod]]:
    """Return role → its pods, by name; see :class:`Scene`."""
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
    """Return the pods that have not ended; one that was evicted stays for people to look at."""
    return [pod for pod in pods if pod.status.phase not in ("Failed", "Succeeded")]


def role_of(child: Child) -> str:
    """Return the role that a child belongs to."""
    return child.metadata.labels.get(ROLE, "")


def workloads(observed: Observed) -> list[Child]:
    """Return all objects of the job that have pods, but for those that are being deleted, by kind and name."""
    return [
        observed.children[ref]
        for ref in sorted(observed.children)
        if ref[0] in WORKLOADS and observed.children[ref].metadata.deletion_timestamp is None
    ]


def deletion(child: Child) -> tuple[Ref, str]:
    """Return what a plan says to have a child deleted."""
    return (child.kind, child.metadata.name), child.metadata.uid


def condition(child: Child, *types: str) -> dict[str, Any] | None:
    """Return the first of the child's conditions of these types that is true."""
    conditions = child.body.get("status", {}).get("conditions", ())
    return next((each for each in conditions if each.get("type") in types and each.get("status") == "True"), None)


def pod_condition(pod: Pod, kind: str) -> ObjectCondition | None:
    """Return a condition of a pod."""
    for each in pod.status.conditions:  # a loop: this is asked of every pod several times in a decision
        if each.type == kind:
            return each
    return None


def controller(pod: Pod) -> OwnerReference | None:
    """Return who made a pod; None for one that somebody made by hand, which is none of the job's whatever its labels
    say."""
    return next((owner for owner in pod.metadata.owner_references if owner.controller), None)


def is_ready(pod: Pod) -> bool:
    """Return whether a pod is ready."""
    found = pod_condition(pod, "Ready")
    return found is not None and found.status == "True"


def is_disrupted(pod: Pod) -> bool:
    """Return whether something outside ends or ended a pod."""
    found = pod_condition(pod, DISRUPTED)
    return found is not None and found.status == "True"
