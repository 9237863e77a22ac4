"""Gangs that a scheduler places as a whole, by a PodGroup: when their pods are created, and why they wait.

The pods of the trainer and the minimum of engines are created together, because a scheduler waits for all of them.
Elastic engines follow when all of these have nodes.

kube-scheduler (provider ``kubernetes``) tries the pods of a gang in a fixed order: first the pod that completed the
gang, then the others at random. Engines that it spreads over all nodes leave none for a trainer that needs a whole
node, and another order is never tried. So the trainer's Job is created when all engines of the gang exist. With several
pods of the trainer, the engines are replaced once if the gang finds no nodes: then they are tried after the trainer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rljob.manifests.gang import GANG, GROUP, WITH_POD_GROUP, pods_of
from rljob.manifests.inputs import Object
from rljob.manifests.names import RAY_CLUSTER, TIER
from rljob.operator.api_types import Pod
from rljob.operator.object_kinds import GANG_CHILDREN, NATIVE_POD_GROUPS, ref_of
from rljob.operator.plan import COORDINATOR, TRAINER, Ref
from rljob.operator.planning import lost_nodes, pod_diagnosis
from rljob.operator.planning.job_view import JobView, alive, has_node, pod_condition, role_of_pod
from rljob.operator.planning.plan_builder import PlanBuilder
from rljob.operator.planning.timestamps import remaining, seconds_of

NATIVE = "kubernetes"
REORDER_SECONDS = 10.0
"""A gang waits for this time before its engines are replaced, to be tried after the trainer."""
PLACE_SECONDS = 5.0
"""Time in which a scheduler usually places a gang. After it, or when the scheduler reports a cause, the gang waits."""
_KINDS = frozenset(resource.key for resource in GANG_CHILDREN)
_UNINFORMATIVE = ("waiting for minCount", "tasks in gang unschedulable", "can possibly be assigned")
"""Parts of the messages of a scheduler about a pod that has room, while another pod of its gang has none."""


def is_member(rendered: Object) -> bool:
    """Return whether a rendered object makes pods of the gang."""
    template, _ = pods_of(rendered)
    return bool(template.get("metadata", {}).get("labels", {}).get(TIER) == GANG)


def is_placed(view: JobView) -> bool:
    """Return whether all pods of the gang have nodes, and it is not created again."""
    if _is_outgrown(view):
        return False
    placed = [pod for pod in _members(view) if has_node(pod)]
    return all(sum(role_of_pod(pod) == role for pod in placed) >= count for role, count in _wanted(view).items())


def waits_for_engines(view: JobView) -> bool:
    """Return whether the trainer's Job is created later: when all engines of the gang exist."""
    if view.gang != NATIVE:
        return False
    pods = _members(view)
    return any(
        sum(role_of_pod(pod) == role for pod in pods) < count
        for role, count in _wanted(view).items()
        if role != TRAINER
    )


def renews_engines(view: JobView) -> bool:
    """Return whether the engines of the gang are removed, to be created again after the trainer's pods."""
    role = view.role(TRAINER)
    if view.gang != NATIVE or role is None or role.desired < 2:
        return False
    pods = _members(view)
    trainer = [pod for pod in pods if role_of_pod(pod) == TRAINER]
    if len(trainer) < role.desired or any(map(has_node, pods)):
        return False
    newest = max(seconds_of(pod.metadata.creation_timestamp) or 0.0 for pod in trainer)
    engines = [seconds_of(pod.metadata.creation_timestamp) or 0.0 for pod in pods if role_of_pod(pod) != TRAINER]
    first_tried = any(created < newest + REORDER_SECONDS / 2 for created in engines)
    return first_tried and _seconds_left(view, trainer, REORDER_SECONDS) <= 0


def requeue(builder: PlanBuilder, view: JobView) -> None:
    """Plan again when a gang that waits has waited long enough."""
    if view.gang not in WITH_POD_GROUP or is_placed(view):
        return
    for span in (PLACE_SECONDS, REORDER_SECONDS):
        builder.requeue_after(_seconds_left(view, _members(view), span))


def withheld(builder: PlanBuilder, view: JobView) -> set[Ref]:
    """Return the rendered objects that are not created now: a PodGroup that cannot be changed, and workloads whose
    PodGroup cannot be created. Delete the gang if its PodGroup demands another number of pods and cannot stay.

    The spec of a native PodGroup is immutable, and a PodGroup in use is deleted only with its last pod.
    """
    group = _group(view)
    if group is None:
        return set()
    observed, ref = view.observed, ref_of(group)
    if view.gang not in WITH_POD_GROUP:
        return {ref}  # a Workload of Kueue, which is not changed once it is admitted
    child = observed.children.get(ref)
    members = {ref_of(each) for role in view.roles for each in role.objects if is_member(each)}
    kept: set[Ref] = {ref} if child is not None and ref[0] == NATIVE_POD_GROUPS.key else set()
    if child is not None and _is_outgrown(view):
        found = (each for _, each in sorted(observed.children.items()) if is_member(each.body))
        builder.delete(each for each in (child, *found) if each.metadata.deletion_timestamp is None)
        return kept | members
    leaves = child is not None and child.metadata.deletion_timestamp is not None
    if ref in observed.refused or (leaves and not _has_workloads(view)):
        # The names of RayClusters change, so those of the gang are withheld together.
        return kept | {each for each in members if each not in observed.children or each[0] == RAY_CLUSTER}
    return kept


def release(builder: PlanBuilder) -> None:
    """Delete the description of the gang of a job that has ended or is suspended, once the pods that it counts are
    gone or lost: a scheduler or Kueue reserves resources for it."""
    observed = builder.observed
    if any(role_of_pod(pod) != COORDINATOR for pod in lost_nodes.occupying(builder)):
        return
    builder.delete(
        child
        for ref, child in sorted(observed.children.items())
        if ref[0] in _KINDS and child.metadata.deletion_timestamp is None
    )


def waiting(view: JobView) -> str | None:
    """Return why no pod of the gang has a node; None if one has, or if the scheduler is about to place them."""
    if view.gang not in WITH_POD_GROUP:
        return None
    pods, total = _members(view), sum(_wanted(view).values())
    if not pods or any(map(has_node, pods)):
        return None
    causes = _causes(pods)
    if not causes and _seconds_left(view, pods, PLACE_SECONDS) > 0:
        return None
    cause = ", ".join(causes) or "the scheduler has not placed it yet"
    return f"none of the {total} pods of the gang has a node: {cause}"


def _group(view: JobView) -> Object | None:
    """Return the rendered object that describes the gang."""
    role = view.role(GROUP)
    return role.objects[0] if role is not None else None


def _is_outgrown(view: JobView) -> bool:
    """Return whether a native PodGroup must be created again: it demands more pods than the job has, or fewer while no
    pod of the trainer has a node: engines alone could satisfy it and take the trainer's place."""
    group = _group(view)
    child = view.observed.children.get(ref_of(group)) if group is not None else None
    if view.gang != NATIVE or group is None or child is None:
        return False
    there, wanted = _min_count(child.body), _min_count(group)
    trains = any(has_node(pod) for pod in _members(view) if role_of_pod(pod) == TRAINER)
    return there > wanted or (there < wanted and not trains)


def _has_workloads(view: JobView) -> bool:
    """Return whether the gang has workloads. Their pods keep a PodGroup that a user has deleted, and new pods may join
    it."""
    present = (each for each in view.observed.children.values() if each.metadata.deletion_timestamp is None)
    return any(is_member(each.body) for each in present)


def _min_count(group: Object) -> int:
    policy = (group.get("spec") or {}).get("schedulingPolicy") or {}
    return int((policy.get("gang") or {}).get("minCount", 0))


def _members(view: JobView) -> list[Pod]:
    """Return the pods of the gang that neither have ended nor are being deleted."""
    return [pod for pods in view.pods.values() for pod in alive(pods) if pod.metadata.labels.get(TIER) == GANG]


def _wanted(view: JobView) -> Mapping[str, int]:
    """Return role → number of its pods in the gang."""
    found: Counter[str] = Counter()
    for role in view.roles:
        for each in role.objects:
            if is_member(each):
                found[role.name] += pods_of(each)[1]
    return found


def _causes(pods: Sequence[Pod]) -> list[str]:
    """Return the causes that the scheduler reports, without duplicates and without those that only refer to others."""
    conditions = (pod_condition(pod, "PodScheduled") for pod in pods)
    messages = {each.message for each in conditions if each is not None and each.status == "False"}
    return sorted(
        {
            pod_diagnosis.scheduling(text)
            for text in messages
            if text and not any(each in text for each in _UNINFORMATIVE)
        }
    )


def _seconds_left(view: JobView, pods: Sequence[Pod], span: float) -> float:
    """Return the seconds until the newest of some pods has existed for ``span`` seconds; 0 or less: it has."""
    created = max((pod.metadata.creation_timestamp for pod in pods), default=None)
    return remaining(created, span, view.now)
