"""Engines that span hosts: which RayClusters a pool has, and when one is replaced.

A RayCluster is replaced as a whole when its engine has ended (:mod:`.ray_engine_state`). Its successor has another
name, and does not wait for pods on a lost node. Exits are counted against failurePolicy.maxRestarts: the annotation
:data:`~rljob.manifests.names.RESTARTS` carries the count to the successor.

A scheduler without gangs may place a part of the hosts of two engines, which then wait for each other. After a while
one of them is removed, and no other engine of the pool is made until the older one has all its nodes.

Engines that are not needed any more are drained first (:mod:`.scale`), like engines in one pod.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rljob.manifests.gang import ELASTIC, GANG, WITH_POD_GROUP, tier_name
from rljob.manifests.inputs import Object
from rljob.manifests.names import RAY_CLUSTER, RESTARTS, ROLE_HASH, TIER, object_name
from rljob.manifests.ray_clusters import CLUSTER_LABEL
from rljob.manifests.render_context import RenderedRole
from rljob.operator.api_types import Child, Pod
from rljob.operator.plan import Event, Ref
from rljob.operator.planning import gang_placement, reasons
from rljob.operator.planning.job_view import JobView, restarts_before
from rljob.operator.planning.plan_builder import PlanBuilder
from rljob.operator.planning.ray_engine_state import RayEngine, engines
from rljob.operator.planning.scale import DrainState, drain_order, may_grow
from rljob.operator.planning.timestamps import remaining

UNAVAILABLE = 0.25
"""Share of the engines of a tier that are replaced at a time after a change of the manifest; at least one."""
PARTIAL_SECONDS = 60.0
"""An engine that has nodes for a part of its hosts only for this time is waiting for others."""


def leaving(builder: PlanBuilder, view: JobView) -> list[RayEngine]:
    """Return the engines that the pools do not need any more, those that drain already first. An engine that is about
    to be replaced is none of them."""
    found = []
    for role in _pools(view):
        for tier in (GANG, ELASTIC):
            kept = [each for each in engines(view, role, tier) if not each.is_due(view.now)]
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
        partial: list[RayEngine] = []
        for tier in (GANG, ELASTIC):
            rendered, found = _rendered(role, tier), engines(view, role, tier)
            known |= {(RAY_CLUSTER, each.name) for each in found}
            placed_together = in_group and tier == GANG
            partial += [] if placed_together else _partial(builder, found)
            gives_back = {each.name for each in partial[1:]}
            builder.delete(each.cluster for each in found if each.name in gives_back)
            present = [each for each in found if each.name not in gives_back]
            if tier == GANG and renews:
                builder.delete(each.cluster for each in present)
            if tier == GANG and (withheld or renews):
                continue
            may_create = not blocked and (placed_together or (grows and not partial))
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


def _partial(builder: PlanBuilder, found: Sequence[RayEngine]) -> list[RayEngine]:
    """Return the engines that wait for nodes for the rest of their hosts since a while, the oldest first."""
    waiting = []
    for each in found:
        if each.is_partial:
            left = remaining(each.cluster.metadata.creation_timestamp, PARTIAL_SECONDS, builder.now)
            builder.requeue_after(left)
            waiting += [each] if left <= 0 else []
    return sorted(waiting, key=lambda each: (each.cluster.metadata.creation_timestamp, each.name))


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
        if not each.is_due(view.now):
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
