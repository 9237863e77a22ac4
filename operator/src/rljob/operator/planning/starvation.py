"""Whether a job's own elastic engines keep a pod of its gang waiting.

The gang is the trainer and the minimum of engines of each pool; nothing is trained without it. When the trainer dies,
the scheduler may give its accelerators to pending elastic engines, and the next attempt finds none. So elastic engines
are removed while a pod of the gang finds no resources, and come back when the gang has its nodes.
"""

from __future__ import annotations

from rljob.manifests.gang import ELASTIC, GANG
from rljob.manifests.names import TIER
from rljob.operator.api_types import Pod
from rljob.operator.plan import Observed
from rljob.operator.planning.job_view import alive, pod_condition
from rljob.operator.planning.timestamps import remaining

STARVATION_SECONDS = 5.0
"""A pod of the gang waits for this time before elastic engines are removed: most pods are bound within a second."""
TERMINATION_SECONDS = 10.0
"""A pod that is deleted has this time beyond its grace period, at whose end deletionTimestamp is."""
_NO_RESOURCES = "Insufficient "
"""Part of the scheduler's message if nodes lack a resource. Other causes are not removed by ending engines."""


def seconds_to_starvation(observed: Observed) -> float | None:
    """Return the seconds until elastic engines are given back, 0 or less: now; None if no pod of the gang needs them.

    While an old pod of the gang terminates, its accelerators are about to become free, and nothing is given back. One
    that stays after its grace period is on a lost node.
    """
    gang = [pod for pod in alive(observed.pods) if pod.metadata.labels.get(TIER) == GANG]
    waits = [left for pod in gang if (left := _seconds_left(pod, observed.now)) is not None]
    ends = (pod.metadata.deletion_timestamp for pod in gang if pod.metadata.deletion_timestamp is not None)
    return max([min(waits), *(remaining(end, TERMINATION_SECONDS, observed.now) for end in ends)]) if waits else None


def has_elastic_engines(observed: Observed) -> bool:
    """Return whether there are engines to give back."""
    return any(pod.metadata.labels.get(TIER) == ELASTIC for pod in alive(observed.pods))


def _seconds_left(pod: Pod, now: float) -> float | None:
    scheduled = pod_condition(pod, "PodScheduled")
    if scheduled is None or scheduled.status != "False" or _NO_RESOURCES not in scheduled.message:
        return None
    return remaining(scheduled.last_transition_time or pod.metadata.creation_timestamp, STARVATION_SECONDS, now)
