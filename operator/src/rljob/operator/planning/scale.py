"""Replicas and disruption budgets.

Engines are drained before they are removed: `status.draining` names them for the coordinator, and their Deployment is
lowered when they are idle, or after DRAIN_SECONDS. Of engines that span hosts, which :mod:`.ray_engines` removes, it
names the head pods.

A node drain evicts the pods of a role one at a time and waits for each replacement. If no node has room for the
replacement, the drain would wait forever. A pod that has found no node for long protects nothing, so the budget then
allows one more eviction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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


@dataclass(frozen=True)
class DrainState:
    """Progress of draining. ``left``: seconds that engines have at most; 0 or less: none. ``engines``: as the
    coordinator reports them."""

    left: float
    engines: Mapping[str, EngineStatus]

    def holds(self, pod: Pod | None) -> bool:
        """Return whether an engine is kept, because it has requests. ``pod``: of the agent; None: it is not ready."""
        return pod is not None and self.left > 0 and not _idle(self.engines.get(pod.metadata.name))


def drain(builder: PlanBuilder, view: JobView, heads: Sequence[str] = ()) -> tuple[dict[str, int], DrainState]:
    """Choose the engines to remove; return Deployment → replicas that it keeps until they are drained.

    A Deployment that is not rendered any more, because its pool cannot grow, is included until it may be deleted.

    Args:
        builder: of the plan.
        view: of the job.
        heads: head pods of engines that span hosts and are removed.
    """
    pools = _pools(view)
    leaving: list[str] = [*heads]
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
    state = _drain_state(builder, view)
    if heads:
        builder.requeue_after(state.left)
    held = _hold_until_drained(builder, state, view, pools, lowering)
    _reset_costs(builder, view)
    return held, state


def _drain_state(builder: PlanBuilder, view: JobView) -> DrainState:
    span = GIVE_BACK_SECONDS if view.gives_back else DRAIN_SECONDS
    left = remaining(builder.status.draining_since, span, builder.now) if builder.status.draining else 0.0
    return DrainState(left, _engines(builder.status.run))


def choose(pods: Sequence[Pod], count: int, already: Iterable[str], run: RunState | None) -> list[str]:
    """Return the names of ``count`` pods to remove: those that drain already, then those that are not ready, then those
    with the lowest load; among equal pods the newest."""
    order = drain_order(already, run)
    newest = sorted(pods, key=lambda pod: (pod.metadata.creation_timestamp, pod.metadata.name), reverse=True)
    ordered = sorted(newest, key=lambda pod: order(pod, is_ready(pod)))
    return [pod.metadata.name for pod in ordered[: max(0, count)]]


def drain_order(already: Iterable[str], run: RunState | None) -> Callable[[Pod | None, bool], tuple[int, bool, int]]:
    """Return the key by which engines are removed, smallest first, from the pod with the agent and whether the engine
    is ready: those that drain already, then those that are not ready, then those with the lowest load."""
    engines = _engines(run)
    position = {name: place for place, name in enumerate(already)}

    def order(pod: Pod | None, ready: bool) -> tuple[int, bool, int]:
        name = pod.metadata.name if pod is not None else ""
        engine = engines.get(name)
        return position.get(name, len(position)), ready, engine.load if engine else 0

    return order


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
    if view.gang in WITH_POD_GROUP and gang_placement.is_member(rendered):
        return 0 if gang_placement.renews_engines(view) else None
    if may_grow(view):
        return None
    child = view.observed.children.get(ref_of(rendered))
    return min(rendered["spec"]["replicas"], _replicas(child) if child is not None else 0)


def may_grow(view: JobView) -> bool:
    """Return whether engines that are in no PodGroup may start: the trainer, or the whole gang, has its nodes."""
    if view.gang in WITH_POD_GROUP:
        return gang_placement.is_placed(view)
    role = view.role(TRAINER)
    assert role is not None, "every job has a trainer"
    return sum(map(has_node, view.pods.get(TRAINER, ()))) >= role.desired


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
    builder: PlanBuilder,
    state: DrainState,
    view: JobView,
    pools: Sequence[EngineDeployment],
    lowering: Mapping[str, int],
) -> dict[str, int]:
    if not lowering:
        return {}
    pods = {pod.metadata.name: pod for each in view.pods.values() for pod in each}
    held = {}
    for pool in pools:
        if pool.name not in lowering:
            continue
        being_deleted = [pod for pod in builder.status.draining if pod in pods and pool.selects(pods[pod])]
        if any(state.holds(pods[pod]) for pod in being_deleted if is_ready(pods[pod])):
            held[pool.name] = lowering[pool.name]
            builder.requeue_after(state.left)
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
    """Return the engines in one pod each."""
    roles = (role for role in view.roles if role.kind == "rollout" and role.hosts == 1)
    return [pod for role in roles for pod in view.pods.get(role.name, ())]


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
    """Return a disruption budget that allows one eviction besides the unschedulable pods; the trainer's unchanged."""
    if role.kind == TRAINER:
        return rendered
    waits = [
        left
        for pod in alive(view.pods.get(role.name, ()))
        if (left := _seconds_to_schedule(pod, builder.now)) is not None
    ]
    for left in waits:
        builder.requeue_after(left)
    lost = sum(left <= 0 for left in waits)
    if not lost:
        return rendered
    spec = rendered["spec"]
    if "maxUnavailable" in spec:
        return {**rendered, "spec": {**spec, "maxUnavailable": spec["maxUnavailable"] + lost}}
    return {**rendered, "spec": {**spec, "minAvailable": max(0, spec["minAvailable"] - lost)}}


def _seconds_to_schedule(pod: Pod, now: float) -> float | None:
    """Return the seconds until a pending pod stops counting; None for a scheduled pod."""
    scheduled = pod_condition(pod, "PodScheduled")
    if scheduled is None or scheduled.status != "False":
        return None
    return remaining(scheduled.last_transition_time or pod.metadata.creation_timestamp, SCHEDULING_SECONDS, now)
