"""Replicas and disruption budgets.

Engines are drained before they are removed: `status.draining` names them for the coordinator, and their Deployment is
lowered when they are idle, or after DRAIN_SECONDS.

A node drain evicts the pods of a role one at a time and waits for each replacement. If no node has room for the
replacement, the drain would wait forever. A pod that has found no node for long protects nothing, so the budget then
allows one more eviction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rljob.api.job_status import EngineStatus, RunState
from rljob.manifests.gang import WITH_POD_GROUP
from rljob.manifests.inputs import Object
from rljob.manifests.render_context import RenderedRole
from rljob.operator.api_types import Child, Pod
from rljob.operator.object_kinds import ref_of
from rljob.operator.plan import POD_DELETION_COST, TRAINER
from rljob.operator.planning import gang_placement
from rljob.operator.planning.job_view import JobView, alive, has_node, is_ready, pod_condition, role_of, workloads
from rljob.operator.planning.plan_builder import PlanBuilder
from rljob.operator.planning.timestamps import remaining, seconds_of

DRAIN_SECONDS = 60.0
"""After this time an engine is removed with its requests, which are repeated on other engines."""
GIVE_BACK_SECONDS = 20.0
"""The same for engines that are given back to the gang, which trains nothing meanwhile."""
MOST_DRAINING = 1024
"""Limit of the status field; further engines are removed without draining."""
REMOVE_FIRST_COST = -1000
"""Deletion cost of pods that a Deployment must remove first; other pods have 0."""


@dataclass(frozen=True)
class EngineDeployment:
    """A Deployment of engines. ``wanted``: its replicas after draining."""

    role: str
    name: str
    wanted: int
    selector: Mapping[str, str]

    def selects(self, pod: Pod) -> bool:
        """Return whether the Deployment selects the pod."""
        return self.selector.items() <= pod.metadata.labels.items()


def drain(builder: PlanBuilder, view: JobView) -> dict[str, int]:
    """Choose the engines to remove; return Deployment → replicas that it keeps until they are drained.

    A Deployment that is not rendered any more, because its pool cannot grow, is included until it may be deleted.
    """
    pools = _pools(view)
    leaving: list[str] = []
    lowering: dict[str, int] = {}
    for pool in pools:
        child = view.observed.children.get(("Deployment", pool.name))
        if child is None:
            continue
        pods = [pod for pod in alive(view.pods.get(pool.role, ())) if pool.selects(pod)]
        leaving += choose(pods, len(pods) - pool.wanted, builder.status.draining, builder.status.run)
        if _replicas(child) > pool.wanted:
            lowering[pool.name] = _replicas(child)
    leaving += _orphaned_engines(builder, view, pools)
    _record_draining(builder, leaving)
    held = _hold_until_drained(builder, view, pools, lowering)
    _reset_costs(builder, view)
    return held


def choose(pods: Sequence[Pod], count: int, already: Iterable[str], run: RunState | None) -> list[str]:
    """Return the names of ``count`` pods to remove: those that drain already, then those that are not ready, then those
    with the lowest load; among equal pods the newest."""
    engines = _engines(run)
    position = {name: place for place, name in enumerate(already)}

    def order(pod: Pod) -> tuple[int, bool, int]:
        name = pod.metadata.name
        engine = engines.get(name)
        return position.get(name, len(position)), is_ready(pod), engine.load if engine else 0

    newest = sorted(pods, key=lambda pod: (pod.metadata.creation_timestamp, pod.metadata.name), reverse=True)
    return [pod.metadata.name for pod in sorted(newest, key=order)[: max(0, count)]]


def with_replicas(rendered: Object, replicas: int | None) -> Object:
    """Return an object with other replicas; the same object if ``replicas`` is None."""
    return rendered if replicas is None else {**rendered, "spec": {**rendered["spec"], "replicas": replicas}}


def before_placement(view: JobView, rendered: Object) -> int | None:
    """Return the replicas of a Deployment of engines while a pod of the trainer has no node: no more than it has now.

    The trainer needs the most of a node. If engines came first, the scheduler would spread them over all nodes, and a
    job that fits exactly would wait for itself. Engines start when the trainer has its nodes; it need not be ready.
    A scheduler that places the gang as a whole needs all its pods, so only elastic engines wait, for the whole gang.
    None: the Deployment has the replicas of its rendering.
    """
    role = view.role(TRAINER)
    assert role is not None, "every job has a trainer"
    if view.gang in WITH_POD_GROUP:
        if gang_placement.is_member(rendered):
            return 0 if gang_placement.renews_engines(view) else None
        if gang_placement.is_placed(view):
            return None
    elif sum(map(has_node, view.pods.get(TRAINER, ()))) >= role.desired:
        return None
    child = view.observed.children.get(ref_of(rendered))
    return min(rendered["spec"]["replicas"], _replicas(child) if child is not None else 0)


def _record_draining(builder: PlanBuilder, leaving: list[str]) -> None:
    """Record the engines to remove. The wait starts again if more pods of a Deployment drain, not if a draining pod was
    replaced by another."""
    status, leaving = builder.status, leaving[:MOST_DRAINING]
    since = seconds_of(status.draining_since or "")
    before, after = (Counter(map(_maker, names)) for names in (status.draining, leaving))
    if not leaving:
        status.draining_since = None
    elif after - before or since is None or since > builder.now:  # the clock went back: start again
        status.draining_since = builder.instant
    status.draining = leaving


def _maker(pod: str) -> str:
    """Return the prefix of a pod's name that its Deployment determines: names are DEPLOYMENT-REPLICASET-POD."""
    return pod.rsplit("-", 2)[0]


def _hold_until_drained(
    builder: PlanBuilder, view: JobView, pools: Sequence[EngineDeployment], lowering: Mapping[str, int]
) -> dict[str, int]:
    if not lowering:
        return {}
    span = GIVE_BACK_SECONDS if view.gives_back else DRAIN_SECONDS
    left = remaining(builder.status.draining_since, span, builder.now) if builder.status.draining else 0.0
    engines = _engines(builder.status.run)
    pods = {pod.metadata.name: pod for each in view.pods.values() for pod in each}
    held = {}
    for pool in pools:
        if pool.name not in lowering:
            continue
        being_deleted = [pod for pod in builder.status.draining if pool.selects(pods[pod])]
        if left > 0 and any(is_ready(pods[pod]) and not _idle(engines.get(pod)) for pod in being_deleted):
            held[pool.name] = lowering[pool.name]
            builder.requeue_after(left)
        elif pool.wanted:  # otherwise all pods are removed, in any order
            builder.pod_costs.update(dict.fromkeys(being_deleted, REMOVE_FIRST_COST))
    return held


def _reset_costs(builder: PlanBuilder, view: JobView) -> None:
    """Reset the deletion cost of engines that are not removed after all."""
    being_deleted = set(builder.status.draining)
    for pod in _engine_pods(view):
        cheap = pod.metadata.annotations.get(POD_DELETION_COST) == str(REMOVE_FIRST_COST)
        if cheap and pod.metadata.name not in being_deleted:
            builder.pod_costs[pod.metadata.name] = 0


def _pools(view: JobView) -> list[EngineDeployment]:
    found = {
        rendered["metadata"]["name"]: _pool(role.name, rendered, rendered["spec"].get("replicas", 1))
        for role in view.roles
        if role.kind == "rollout"
        for rendered in role.objects
        if rendered["kind"] == "Deployment"
    }
    roles = {pool.role for pool in found.values()}
    for child in workloads(view.observed):
        if child.kind == "Deployment" and role_of(child) in roles and child.metadata.name not in found:
            found[child.metadata.name] = _pool(role_of(child), child.body, 0)
    return list(found.values())


def _pool(role: str, deployment: Object, wanted: int) -> EngineDeployment:
    return EngineDeployment(role, deployment["metadata"]["name"], wanted, deployment["spec"]["selector"]["matchLabels"])


def _engine_pods(view: JobView) -> list[Pod]:
    return [pod for role in view.roles if role.kind == "rollout" for pod in view.pods.get(role.name, ())]


def _orphaned_engines(builder: PlanBuilder, view: JobView, pools: Sequence[EngineDeployment]) -> list[str]:
    """Return draining engines whose Deployment has been deleted: they must get no requests while they terminate."""
    if not builder.status.draining:
        return []
    draining = set(builder.status.draining)
    return [
        pod.metadata.name
        for pod in alive(_engine_pods(view))
        if pod.metadata.name in draining and not any(pool.selects(pod) for pool in pools)
    ]


def _replicas(child: Child) -> int:
    return int(child.body.get("spec", {}).get("replicas", 1))


def _engines(run: RunState | None) -> dict[str, EngineStatus]:
    return {engine.name: engine for engine in run.engines} if run else {}


def _idle(engine: EngineStatus | None) -> bool:
    return engine is None or engine.drained


SCHEDULING_SECONDS = 300.0
"""Seconds until a pending pod stops counting for the budget: an autoscaler adds a node within this time."""


def with_room(builder: PlanBuilder, view: JobView, role: RenderedRole, rendered: Object) -> Object:
    """Return a disruption budget that allows one eviction besides the unschedulable pods; other objects, and budgets
    with minAvailable, unchanged."""
    bound = rendered["spec"].get("maxUnavailable")
    if bound is None:
        return rendered
    waits = [
        left
        for pod in alive(view.pods.get(role.name, ()))
        if (left := _seconds_to_schedule(pod, builder.now)) is not None
    ]
    for left in waits:
        builder.requeue_after(left)
    lost = sum(left <= 0 for left in waits)
    return {**rendered, "spec": {**rendered["spec"], "maxUnavailable": bound + lost}} if lost else rendered


def _seconds_to_schedule(pod: Pod, now: float) -> float | None:
    """Return the seconds until a pending pod stops counting; None for a scheduled pod."""
    scheduled = pod_condition(pod, "PodScheduled")
    if scheduled is None or scheduled.status != "False":
        return None
    return remaining(scheduled.last_transition_time or pod.metadata.creation_timestamp, SCHEDULING_SECONDS, now)
