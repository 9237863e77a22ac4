"""Finds stalled objects whose cause is reported only in events: a pod whose volumes cannot be mounted, a Job whose pods
are refused, a claim whose StorageClass does not exist."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rljob.operator.api_types import Child, ContainerStatus, Pod
from rljob.operator.plan import Ref
from rljob.operator.planning.job_view import DISRUPTED, condition, controller, pod_condition
from rljob.operator.planning.pod_diagnosis import key_of_claim, waits_for_claim
from rljob.operator.planning.timestamps import remaining

STALLED_SECONDS = 8.0
"""Seconds that mounting volumes, creating pods and binding a claim may take before events are read."""
ASK_SECONDS = 10.0
"""Interval between two reads of events."""
_SILENT = frozenset({"", "ContainerCreating", "PodInitializing"})
_FINISHED = ("Complete", "SuccessCriteriaMet", "Failed", "FailureTarget", "Suspended")


def stalled(pods: Iterable[Pod], children: Mapping[Ref, Child], now: float, claim: str = "") -> dict[str, float]:
    """Return uid → seconds until an object counts as stalled; 0 or less if it does.

    Args:
        pods: the job's.
        children: the job's.
        now: Unix seconds.
        claim: spec.storage.claim; its entry has a key instead of a uid.
    """
    pods = list(pods)
    owners = {owner.uid for pod in pods if (owner := controller(pod)) is not None}
    found = {}
    for pod in pods:
        scheduled = pod_condition(pod, "PodScheduled")
        since = (scheduled.last_transition_time if scheduled is not None else None) or pod.metadata.creation_timestamp
        if scheduled is not None and scheduled.status == "True" and _is_silent(pod):
            found[pod.metadata.uid] = remaining(since, STALLED_SECONDS, now)
        if claim and scheduled is not None and waits_for_claim(pod):
            left, key = remaining(since, STALLED_SECONDS, now), key_of_claim(claim)
            found[key] = min(left, found.get(key, left))
    for (kind, _), child in children.items():
        if child.metadata.deletion_timestamp is not None:
            continue
        no_pods = kind == "Job" and child.metadata.uid not in owners and condition(child, *_FINISHED) is None
        unbound = kind == "PersistentVolumeClaim" and child.body.get("status", {}).get("phase") == "Pending"
        if no_pods or unbound:
            found[child.metadata.uid] = remaining(child.metadata.creation_timestamp, STALLED_SECONDS, now)
    return found


def _is_silent(pod: Pod) -> bool:
    """Return whether a scheduled pod's containers report no reason for not starting."""
    if pod.status.phase != "Pending" or pod.metadata.deletion_timestamp is not None:
        return False
    if pod_condition(pod, DISRUPTED) is not None:
        return False
    return all(map(_waits_silently, (*pod.status.init_container_statuses, *pod.status.container_statuses)))


def _waits_silently(container: ContainerStatus) -> bool:
    waiting = container.state.waiting
    if waiting is not None:
        return waiting.reason in _SILENT
    return container.state.terminated is None and not container.ready
