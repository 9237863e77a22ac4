"""Engines that span hosts: which RayClusters a pool has, and when one is replaced.

An engine cannot work without one of its pods, and a pod that comes later does not join what runs. So a RayCluster is
replaced as a whole when one of its pods ends: a container exited, or a pod was disrupted, deleted, or is missing. Its
successor has another name, and does not wait for pods on a lost node. An exit is backed off and counted against
failurePolicy.maxRestarts: the annotation :data:`~rljob.manifests.names.RESTARTS` carries the count to the successor. A
disruption is free.

Engines that are not needed any more are drained first (:mod:`.scale`), like engines in one pod.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rljob.manifests.gang import ELASTIC, GANG, WITH_POD_GROUP, tier_name
from rljob.manifests.inputs import Object
from rljob.manifests.names import RAY_CLUSTER, RESTARTS, ROLE_HASH, TIER, object_name
from rljob.manifests.ray_clusters import CLUSTER_LABEL, HEAD, NODE_TYPE
from rljob.manifests.render_context import RenderedRole
from rljob.operator.api_types import Child, Pod, Terminated
from rljob.operator.plan import Event, Ref
from rljob.operator.planning import gang_placement, reasons
from rljob.operator.planning.container_exits import last_end, lived, main_container, with_last_line
from rljob.operator.planning.job_view import JobView, condition, controller, is_disrupted, is_ready, restarts_before
from rljob.operator.planning.plan_builder import PlanBuilder
from rljob.operator.planning.scale import DrainState, drain_order, may_grow
from rljob.operator.planning.timestamps import seconds_of
from rljob.operator.planning.trainer import FORGIVENESS_SECONDS, MAX_BACK_OFF_SECONDS, QUICK_END_SECONDS

PROVISIONED = "RayClusterProvisioned"
"""Condition of a RayCluster: all of its pods have been ready at the same time. It stays true."""
UNAVAILABLE = 0.25
"""Share of the engines of a tier that are replaced at a time after a change of the manifest; at least one."""


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


def leaving(builder: PlanBuilder, view: JobView) -> list[RayEngine]:
    """Return the engines that the pools do not need any more, those that drain already first. An engine that is about
    to be replaced is none of them."""
    found = []
    for role in _pools(view):
        for tier in (GANG, ELASTIC):
            kept = [each for each in engines(view, role, tier) if not _is_due(each, view.now)]
            count = len(kept) - len(_rendered(role, tier))
            found += _least_useful(builder, kept, count)
    return found


def select(
    builder: PlanBuilder, view: JobView, unneeded: Sequence[RayEngine], drain: DrainState, blocked: bool, withheld: bool
) -> list[Object]:
    """Delete and replace RayClusters; return the desired ones. Others that are not deleted are left unchanged.

    Args:
        builder: of the plan.
        view: of the job.
        unneeded: the result of :func:`leaving`.
        drain: how long they may work on.
        blocked: no RayCluster is created.
        withheld: those of the gang are neither created nor changed.
    """
    names = _names_in_use(view)
    desired: list[Object] = []
    known: set[Ref] = set()
    leave = {each.name for each in unneeded}
    in_group, grows = view.gang in WITH_POD_GROUP, may_grow(view)
    renews = gang_placement.renews_engines(view)
    for role in _pools(view):
        for tier in (GANG, ELASTIC):
            rendered, present = _rendered(role, tier), engines(view, role, tier)
            known |= {(RAY_CLUSTER, each.name) for each in present}
            if tier == GANG and renews:
                builder.delete(each.cluster for each in present)
            if tier == GANG and (withheld or renews):
                continue
            may_create = not blocked and (grows or (in_group and tier == GANG))
            # An engine that has ended stays until its successor, which takes over its restarts, may be created.
            kept, inherited = _replace_ended(builder, view, present) if may_create else (present, [])
            staying = [each for each in kept if each.name not in leave]
            for each in kept:
                if each.name in leave and not drain.holds(each.head if each.ready else None):
                    builder.delete([each.cluster])
            if may_create:
                staying = _replace_outdated(builder, role, staying, len(rendered))
            current = [each for each in staying if not _is_outdated(each.cluster, role)]
            desired += [_as(rendered[0], each.name, restarts_before(each.cluster)) for each in current if rendered]
            missing = len(rendered) - len(staying) if may_create else 0
            for restarts in (inherited + [0.0] * len(rendered))[: max(0, missing)]:
                desired.append(_as(rendered[0], _free_name(view, role, tier, names), restarts))
    builder.delete(
        child
        for ref, child in sorted(view.observed.children.items())
        if ref[0] == RAY_CLUSTER and ref not in known and child.metadata.deletion_timestamp is None
    )
    return desired


def _pools(view: JobView) -> list[RenderedRole]:
    return [role for role in view.roles if role.hosts > 1]


def _rendered(role: RenderedRole, tier: str) -> list[Object]:
    """Return the RayClusters that a tier of a pool should have. They differ in their names only."""
    clusters = (each for each in role.objects if each["kind"] == RAY_CLUSTER)
    return [each for each in clusters if each["metadata"]["labels"][TIER] == tier]


def _as(rendered: Object, name: str, restarts: float) -> Object:
    """Return a rendered RayCluster with another name, and the restarts of its predecessors."""
    annotations = {**rendered["metadata"]["annotations"]} | ({RESTARTS: f"{restarts:g}"} if restarts else {})
    return {**rendered, "metadata": {**rendered["metadata"], "name": name, "annotations": annotations}}


def _names_in_use(view: JobView) -> set[str]:
    """Return the names of RayClusters of which something exists: KubeRay takes pods for those of a cluster by name."""
    refs: Iterable[Ref] = [*view.observed.children, *view.observed.foreign]
    used = {name for kind, name in refs if kind == RAY_CLUSTER}
    return used | {pod.metadata.labels[CLUSTER_LABEL] for pod in view.observed.pods if _in_cluster(pod)}


def _in_cluster(pod: Pod) -> bool:
    return CLUSTER_LABEL in pod.metadata.labels


def _free_name(view: JobView, role: RenderedRole, tier: str, used: set[str]) -> str:
    """Return a name that is not used, and mark it as used."""
    base, number = tier_name(role.name, tier), 0
    while (name := object_name(view.observed.metadata.name, *base, str(number))) in used:
        number += 1
    used.add(name)
    return name


def _least_useful(builder: PlanBuilder, kept: Sequence[RayEngine], count: int) -> list[RayEngine]:
    """Return ``count`` engines to remove: those that have ended, then in the order of other engines."""
    newest = sorted(kept, key=lambda each: (each.cluster.metadata.creation_timestamp, each.name), reverse=True)
    order = drain_order(builder.status.draining, builder.status.run)
    ordered = sorted(newest, key=lambda each: (each.end is None, *order(each.head, each.ready)))
    return ordered[: max(0, count)]


def _replace_ended(
    builder: PlanBuilder, view: JobView, present: Sequence[RayEngine]
) -> tuple[list[RayEngine], list[float]]:
    """Delete the engines that have ended and whose back-off is over; return the others, and the restarts of the
    successors."""
    kept, inherited = [], []
    for each in present:
        if not _is_due(each, view.now):
            if each.end is not None:
                builder.requeue_after(each.end.due - view.now)
            kept.append(each)
            continue
        assert each.end is not None
        builder.delete([each.cluster])
        inherited.append(each.end.restarts)
        message = f"RayCluster {each.name} is replaced with all its pods: {each.end.why}"
        builder.events.append(Event("Warning", reasons.ENGINE_REPLACED, message))
    return kept, sorted(inherited, reverse=True)


def _replace_outdated(
    builder: PlanBuilder, role: RenderedRole, staying: list[RayEngine], wanted: int
) -> list[RayEngine]:
    """Delete engines of an older manifest, a part of them at a time; return the others."""
    outdated = [each for each in staying if _is_outdated(each.cluster, role)]
    allowed = max(1, math.floor(wanted * UNAVAILABLE)) - (wanted - sum(each.ready for each in staying))
    removed = [each for each in outdated if not each.ready]
    removed += [each for each in outdated if each.ready][: max(0, allowed)]
    builder.delete(each.cluster for each in removed)
    return [each for each in staying if each not in removed]


def _is_outdated(cluster: Child, role: RenderedRole) -> bool:
    return cluster.metadata.annotations.get(ROLE_HASH) != role.hash


def _is_due(engine: RayEngine, now: float) -> bool:
    return engine.end is not None and engine.end.due <= now


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


def clusters_without_pods(view: JobView) -> list[Child]:
    """Return the RayClusters for which KubeRay has made no pods, the oldest first."""
    found = [each.cluster for role in _pools(view) for each in engines(view, role) if not each.pods]
    return sorted(found, key=lambda child: (child.metadata.creation_timestamp, child.metadata.name))
