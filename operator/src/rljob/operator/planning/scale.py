"""Replicas. Engines are drained before they are removed: the coordinator is told which (`status.draining`), and their
Deployment is lowered once they have nothing left to do, or after a while."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rljob.api.status import Run, RunEngine
from rljob.manifests.inputs import Object
from rljob.manifests.names import selector_text
from rljob.manifests.render_context import RenderedRole
from rljob.operator.planning.draft import Draft
from rljob.operator.planning.scene import Scene, alive, is_ready, role_of, workloads
from rljob.operator.planning.times import remaining, seconds_of
from rljob.operator.seen import Child, Pod

DRAIN_SECONDS = 60.0
"""After so long an engine is removed with what it has: its samples are generated elsewhere."""
MOST_DRAINING = 1024
"""Bound of the status; more go as they are."""
DELETION_COST = -1000
"""Of a pod that is to go first when its Deployment is lowered; others have 0."""
COST = "controller.kubernetes.io/pod-deletion-cost"
"""The annotation."""


@dataclass(frozen=True)
class Pool:
    """A Deployment of engines. ``wanted``: the replicas it shall have in the end."""

    role: str
    name: str
    wanted: int
    selector: Mapping[str, str]

    def selects(self, pod: Pod) -> bool:
        """Return whether it has the pod."""
        return self.selector.items() <= pod.metadata.labels.items()


def drain(draft: Draft, scene: Scene) -> dict[str, int]:
    """Choose the engines that go, and return Deployment → replicas that it keeps until they are drained.

    A Deployment that is no longer rendered, as its pool may not grow any more, is among them until it may be deleted.
    """
    pools = _pools(scene)
    leaving: list[str] = []
    lowering: dict[str, int] = {}
    for pool in pools:
        child = scene.observed.children.get(("Deployment", pool.name))
        if child is None:
            continue
        pods = [pod for pod in alive(scene.pods.get(pool.role, ())) if pool.selects(pod)]
        leaving += choose(pods, len(pods) - pool.wanted, draft.status.draining, draft.status.run)
        if _replicas(child) > pool.wanted:
            lowering[pool.name] = _replicas(child)
    leaving += _left_over(draft, scene, pools)
    _record(draft, leaving)
    held = _hold(draft, scene, pools, lowering)
    _take_costs_back(draft, scene)
    return held


def choose(pods: Sequence[Pod], count: int, already: Iterable[str], run: Run | None) -> list[str]:
    """Return the names of ``count`` pods to remove: those that were told already, then those that do no work, then
    those with the least, of equal ones the newest."""
    engines = _engines(run)
    told = {name: place for place, name in enumerate(already)}

    def order(pod: Pod) -> tuple[int, bool, int]:
        name = pod.metadata.name
        engine = engines.get(name)
        return told.get(name, len(told)), is_ready(pod), engine.load if engine else 0

    newest = sorted(pods, key=lambda pod: (pod.metadata.creation_timestamp, pod.metadata.name), reverse=True)
    return [pod.metadata.name for pod in sorted(newest, key=order)[: max(0, count)]]


def with_scale_status(scene: Scene, role: RenderedRole, rendered: Object) -> Object:
    """Return an RLJobScale with the status that the scale subresource shows, once there is something to show."""
    replicas = len(alive(scene.pods.get(role.name, ())))
    child = scene.observed.children.get((rendered["kind"], rendered["metadata"]["name"]))
    if not replicas and (child is None or not child.body.get("status")):
        return rendered
    selector = selector_text(scene.observed.metadata.name, role.name)
    return {**rendered, "status": {"replicas": replicas, "selector": selector}}


def with_replicas(rendered: Object, replicas: int | None) -> Object:
    """Return an object with other replicas; the same object when ``replicas`` is None."""
    return rendered if replicas is None else {**rendered, "spec": {**rendered["spec"], "replicas": replicas}}


def _record(draft: Draft, leaving: list[str]) -> None:
    """Record which engines are to go. The wait begins anew when more of a Deployment are to go, not when another pod
    took the place of one that is gone."""
    status, leaving = draft.status, leaving[:MOST_DRAINING]
    since = seconds_of(status.draining_since or "")
    before, after = (Counter(map(_maker, names)) for names in (status.draining, leaving))
    if not leaving:
        status.draining_since = None
    elif after - before or since is None or since > draft.now:  # the clock went back: begin anew
        status.draining_since = draft.instant
    status.draining = leaving


def _maker(pod: str) -> str:
    """Return what the pods of one Deployment have in common in their names: DEPLOYMENT-REPLICASET-POD."""
    return pod.rsplit("-", 2)[0]


def _hold(draft: Draft, scene: Scene, pools: Sequence[Pool], lowering: Mapping[str, int]) -> dict[str, int]:
    if not lowering:
        return {}
    left = remaining(draft.status.draining_since, DRAIN_SECONDS, draft.now) if draft.status.draining else 0.0
    engines = _engines(draft.status.run)
    pods = {pod.metadata.name: pod for each in scene.pods.values() for pod in each}
    held = {}
    for pool in pools:
        if pool.name not in lowering:
            continue
        going = [pod for pod in draft.status.draining if pool.selects(pods[pod])]
        if left > 0 and any(is_ready(pods[pod]) and not _idle(engines.get(pod)) for pod in going):
            held[pool.name] = lowering[pool.name]
            draft.look_again(left)
        elif pool.wanted:  # else all go, and none goes first
            draft.pod_costs.update(dict.fromkeys(going, DELETION_COST))
    return held


def _take_costs_back(draft: Draft, scene: Scene) -> None:
    """Have engines that stay after all cost what the others cost."""
    going = set(draft.status.draining)
    for pod in _engine_pods(scene):
        cheap = pod.metadata.annotations.get(COST) == str(DELETION_COST)
        if cheap and pod.metadata.name not in going:
            draft.pod_costs[pod.metadata.name] = 0


def _pools(scene: Scene) -> list[Pool]:
    found = {
        rendered["metadata"]["name"]: _pool(role.name, rendered, rendered["spec"].get("replicas", 1))
        for role in scene.roles
        if role.kind == "rollout"
        for rendered in role.objects
        if rendered["kind"] == "Deployment"
    }
    roles = {pool.role for pool in found.values()}
    for child in workloads(scene.observed):
        if child.kind == "Deployment" and role_of(child) in roles and child.metadata.name not in found:
            found[child.metadata.name] = _pool(role_of(child), child.body, 0)
    return list(found.values())


def _pool(role: str, deployment: Object, wanted: int) -> Pool:
    return Pool(role, deployment["metadata"]["name"], wanted, deployment["spec"]["selector"]["matchLabels"])


def _engine_pods(scene: Scene) -> list[Pod]:
    return [pod for role in scene.roles if role.kind == "rollout" for pod in scene.pods.get(role.name, ())]


def _left_over(draft: Draft, scene: Scene, pools: Sequence[Pool]) -> list[str]:
    """Return the engines that were told to go and whose Deployment has been deleted: they get no work while they go."""
    if not draft.status.draining:
        return []
    told = set(draft.status.draining)
    return [
        pod.metadata.name
        for pod in alive(_engine_pods(scene))
        if pod.metadata.name in told and not any(pool.selects(pod) for pool in pools)
    ]


def _replicas(child: Child) -> int:
    return int(child.body.get("spec", {}).get("replicas", 1))


def _engines(run: Run | None) -> dict[str, RunEngine]:
    return {engine.name: engine for engine in run.engines} if run else {}


def _idle(engine: RunEngine | None) -> bool:
    return engine is None or engine.drained
