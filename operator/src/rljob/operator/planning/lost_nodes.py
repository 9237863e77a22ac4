"""Pods on lost nodes: they terminate for ever, because their kubelet does not report their end.

Kubernetes creates the coordinator's next pod only when the old one is gone, so the old one is deleted without its
kubelet. If it still runs behind a broken network, the lock on the ledger stops one of the two, where the file system of
the claim locks across nodes. The trainer needs no deletion: its next attempt is another Job.

A lost pod does not hold the resources of its gang: schedulers and Kueue give them to others. Kueue does the same: it
counts the pods of a Job only until they terminate, and ends other pods on lost nodes a minute after that, if they allow
it (pkg/controller/failurerecovery).
"""

from __future__ import annotations

import math

from rljob.operator.api_types import Pod
from rljob.operator.object_kinds import PODS
from rljob.operator.plan import COORDINATOR
from rljob.operator.planning.job_view import alive, role_of_pod
from rljob.operator.planning.plan_builder import PlanBuilder
from rljob.operator.planning.timestamps import remaining

LOST_SECONDS = 15.0
"""Seconds after the end of its grace period after which the node of a remaining pod counts as lost."""


def seconds_until_lost(pod: Pod, now: float) -> float:
    """Return the seconds until a pod counts as lost; infinite for a pod that is not being deleted, or has ended."""
    if pod.metadata.deletion_timestamp is None or pod.status.phase in ("Failed", "Succeeded"):
        return math.inf
    return remaining(pod.metadata.deletion_timestamp, LOST_SECONDS, now)


def occupying(builder: PlanBuilder) -> list[Pod]:
    """Return the pods that hold resources of their nodes: those that have not ended and are not lost. Plan again when
    the next of them is lost."""
    left = [(pod, seconds_until_lost(pod, builder.now)) for pod in alive(builder.observed.pods)]
    builder.requeue_after(min((each for _, each in left if 0 < each < math.inf), default=0.0))
    return [pod for pod, each in left if each > 0]


def delete_lost_coordinator(builder: PlanBuilder) -> None:
    """Delete the coordinator's pod if its node is lost."""
    for pod in builder.observed.pods:
        if role_of_pod(pod) != COORDINATOR:
            continue
        left = seconds_until_lost(pod, builder.now)
        if left <= 0:
            builder.deletions[PODS.kind, pod.metadata.name] = pod.metadata.uid
        elif math.isfinite(left):
            builder.requeue_after(left)
