"""What exists of the engines that span hosts, and which of them have ended.

An engine cannot work without one of its pods, and a pod that comes later does not join what runs. So an engine ends
with the first of its pods: a container exited, or a pod was disrupted, deleted, or is missing. An exit is backed off
and counted; the other ends are free.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rljob.manifests.names import RAY_CLUSTER, TIER
from rljob.manifests.ray_clusters import HEAD, NODE_TYPE
from rljob.manifests.render_context import RenderedRole
from rljob.operator.api_types import Child, Pod, Terminated
from rljob.operator.planning.container_exits import last_end, lived, main_container, with_last_line
from rljob.operator.planning.job_view import (
    JobView,
    condition,
    controller,
    has_node,
    is_disrupted,
    is_ready,
    restarts_before,
)
from rljob.operator.planning.timestamps import seconds_of
from rljob.operator.planning.trainer import FORGIVENESS_SECONDS, MAX_BACK_OFF_SECONDS, QUICK_END_SECONDS

PROVISIONED = "RayClusterProvisioned"
"""Condition of a RayCluster: all of its pods have been ready at the same time. It stays true."""


@dataclass(frozen=True)
class EngineEnd:
    """Why an engine has ended. ``due``: Unix seconds at which it is replaced. ``restarts``: of its successor."""

    why: str
    due: float
    restarts: float


@dataclass(frozen=True)
class RayEngine:
    """An engine that spans hosts. ``pods``: with those that are being deleted."""

    cluster: Child
    pods: Sequence[Pod]
    hosts: int
    end: EngineEnd | None

    @property
    def name(self) -> str:
        """Name of its RayCluster."""
        return self.cluster.metadata.name

    @property
    def head(self) -> Pod | None:
        """The pod with the agent, whose name the coordinator knows."""
        return next((pod for pod in self.pods if pod.metadata.labels.get(NODE_TYPE) == HEAD), None)

    @property
    def is_partial(self) -> bool:
        """Whether some of its pods have nodes and others wait for one."""
        with_node = [has_node(pod) for pod in self.pods]
        return self.end is None and any(with_node) and not all(with_node)

    def is_due(self, now: float) -> bool:
        """Return whether the engine has ended and its back-off is over."""
        return self.end is not None and self.end.due <= now

    @property
    def ready(self) -> bool:
        """Whether all pods are ready and none has ended."""
        return self.end is None and len(self.pods) >= self.hosts and all(map(is_ready, self.pods))


def engines(view: JobView, role: RenderedRole, tier: str = "") -> list[RayEngine]:
    """Return the engines of a pool, by name, without those whose RayCluster is being deleted. ``tier``: only these."""
    if role.hosts == 1:
        return []
    pods: dict[str, list[Pod]] = {}
    for pod in view.observed.pods:
        owner = controller(pod)
        if owner is not None and owner.kind == RAY_CLUSTER:
            pods.setdefault(owner.uid, []).append(pod)
    found = []
    for child in view.workloads(role.name):
        if child.kind == RAY_CLUSTER and tier in ("", child.metadata.labels.get(TIER)):
            own = sorted(pods.get(child.metadata.uid, ()), key=lambda pod: pod.metadata.name)
            found.append(RayEngine(child, own, role.hosts, _end_of(child, own, role.hosts, view.now)))
    return found


def clusters_without_pods(view: JobView) -> list[Child]:
    """Return the RayClusters for which KubeRay has made no pods, the oldest first."""
    found = [each.cluster for role in view.roles for each in engines(view, role) if not each.pods]
    return sorted(found, key=lambda child: (child.metadata.creation_timestamp, child.metadata.name))


def _end_of(cluster: Child, pods: Sequence[Pod], hosts: int, now: float) -> EngineEnd | None:
    """Return why an engine has ended; None while it works or starts."""
    before, taken = restarts_before(cluster), _taken(pods)
    if taken is None and (exits := list(_exits(pods))):
        at, pod, end = min(exits, key=lambda exit: (exit[0], exit[1].metadata.name))
        restarts = max(0.0, before - lived(pod, end) / FORGIVENESS_SECONDS) + 1
        back_off = min(MAX_BACK_OFF_SECONDS, 2.0 ** min(6, math.ceil(restarts) - 1))
        due = _after(at, back_off, now)
        return EngineEnd(f"pod {pod.metadata.name}: {with_last_line(end)}", due, round(restarts, 3))
    why = taken or _loss(cluster, pods, hosts)
    if why is None:
        return None
    created = seconds_of(cluster.metadata.creation_timestamp) or now
    return EngineEnd(why, _after(created, QUICK_END_SECONDS, now), before)


def _after(at: float, seconds: float, now: float) -> float:
    """Return the time that is ``seconds`` after ``at``; now if the clock was set back since ``at``."""
    return now if at > now + MAX_BACK_OFF_SECONDS else at + seconds


def _taken(pods: Sequence[Pod]) -> str | None:
    """Return which pod was disrupted or deleted; None if none was. The exits of the others follow from it."""
    for pod in pods:
        if is_disrupted(pod):
            return f"pod {pod.metadata.name} was disrupted"
        if pod.metadata.deletion_timestamp is not None:
            return f"pod {pod.metadata.name} was deleted"
    return None


def _exits(pods: Sequence[Pod]) -> Iterator[tuple[float, Pod, Terminated]]:
    """Yield time, pod and exit of the main containers that have exited at least once. No pod is being deleted."""
    for pod in pods:
        container = main_container(pod)
        end = last_end(container) if container is not None else None
        if container is None or end is None:
            continue
        if container.state.terminated is not None or container.restart_count:
            yield seconds_of(end.finished_at) or 0.0, pod, end


def _loss(cluster: Child, pods: Sequence[Pod], hosts: int) -> str | None:
    """Return which pod the engine has lost without an exit or a deletion; None if it has all."""
    for pod in pods:
        if pod.status.phase in ("Failed", "Succeeded"):
            return f"pod {pod.metadata.name} was terminated by its node"
    provisioned = condition(cluster, PROVISIONED)
    if provisioned is None:
        return None
    late = [pod for pod in pods if pod.metadata.creation_timestamp > str(provisioned.get("lastTransitionTime", ""))]
    if late:
        return f"pod {late[0].metadata.name} came in place of another"
    return "a pod is missing" if len(pods) < hosts else None
