"""Describes how containers ended: "exit code 137 (OOMKilled)", "killed by signal 9"."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rljob.api.pod_models import MAIN
from rljob.api.text_escape import escape_block
from rljob.operator.api_types import ContainerStatus, Pod, Terminated
from rljob.operator.planning.timestamps import remaining, seconds_of

CONFIGURATION_ERROR = 2
"""Exit code of a component that rejects its configuration: a retry would not help."""
END_LAG_SECONDS = 5.0
"""Seconds that the watch of pods may be behind the watch of Jobs: it delivers why a pod failed after the Job has."""
_COMMON = frozenset({"", "Error", "Completed", "ContainerStatusUnknown"})
_ADVICE = {
    "OOMKilled": "its memory limit was reached; raise it in the role's template or the namespace's LimitRange",
}
"""Advice for exits whose termination message has none."""
_SIGNALLED = 128
_LARGEST_SIGNAL = 64


def describe(end: Terminated) -> str:
    """Return how a container ended."""
    if end.reason not in _COMMON:
        return f"exit code {end.exit_code} ({end.reason})"
    signal = end.signal or end.exit_code - _SIGNALLED
    if 0 < signal <= _LARGEST_SIGNAL:
        return f"killed by signal {signal}"
    return f"exit code {end.exit_code}"


def with_last_line(end: Terminated, characters: int = 200) -> str:
    """Return how a container ended, with the last line of its termination message."""
    lines = [line.strip() for line in end.message.splitlines() if line.strip()]
    return _described(end, lines[-1][:characters] if lines else "")


def with_log_end(end: Terminated, characters: int = 1000) -> str:
    """Return how a container ended, with the end of its termination message."""
    text = end.message.strip()
    return _described(end, f"{'…' if len(text) > characters else ''}{text[-characters:]}")


def _described(end: Terminated, text: str) -> str:
    return ": ".join(filter(None, (describe(end), _ADVICE.get(end.reason), escape_block(text))))


def main_container(pod: Pod) -> ContainerStatus | None:
    """Return the status of the pod's main container."""
    for each in pod.status.container_statuses:
        if each.name == MAIN:
            return each
    return None


def last_end(container: ContainerStatus) -> Terminated | None:
    """Return the last exit of a container; None if it has never ended."""
    return container.state.terminated or container.last_state.terminated


def ends(pods: Sequence[Pod]) -> Iterator[tuple[Pod, Terminated]]:
    """Yield the last exits of the main containers of ``pods``."""
    for pod in pods:
        container = main_container(pod)
        end = last_end(container) if container else None
        if end is not None:
            yield pod, end


def end_lag_left(pods: Sequence[Pod], failed: Mapping[str, Any], now: float) -> float:
    """Return for how many seconds the exit behind a Job's condition ``failed`` may still appear in ``pods``; 0 if all
    of them show one. The Job controller observes an exit before the operator's watch delivers it."""
    if len(list(ends(pods))) == len(pods):
        return 0.0
    left = remaining(failed.get("lastTransitionTime"), END_LAG_SECONDS, now)
    return left if 0 < left <= END_LAG_SECONDS else 0.0  # more if the clocks differ


def newest_end(pods: Sequence[Pod]) -> Terminated | None:
    """Return the newest exit; at equal times, the exit of the pod whose name sorts last."""
    found = [(end.finished_at or "", pod.metadata.name, end) for pod, end in ends(pods)]
    return max(found, key=lambda each: each[:2])[2] if found else None


def first_failure(pods: Sequence[Pod]) -> tuple[Pod, Terminated] | None:
    """Return the pod that failed first, with its exit: later failures of the group are consequences. An exit at an
    unknown time is the last."""
    found = [(pod, end) for pod, end in ends(pods) if end.exit_code != 0]
    order = ((end.finished_at is None, end.finished_at or "", pod.metadata.name, pod, end) for pod, end in found)
    return min(order, key=lambda each: each[:3])[3:] if found else None


def began(pod: Pod) -> float | None:
    """Return when a pod's main container started, or else when the pod was scheduled (Unix seconds); infinity if it was
    never scheduled; None if unknown."""
    container = main_container(pod)
    end = last_end(container) if container else None
    if end is not None and (begin := seconds_of(end.started_at)) is not None:
        return begin
    scheduled = next((each for each in pod.status.conditions if each.type == "PodScheduled"), None)
    if scheduled is None:
        return None
    return seconds_of(scheduled.last_transition_time) if scheduled.status == "True" else math.inf


def lived(pod: Pod, end: Terminated) -> float:
    """Return the seconds from the scheduling of a pod to an exit of its container, both times from the cluster."""
    scheduled = next((each.last_transition_time for each in pod.status.conditions if each.type == "PodScheduled"), "")
    scheduled_at, ended_at = seconds_of(scheduled or pod.metadata.creation_timestamp), seconds_of(end.finished_at)
    return max(0.0, ended_at - scheduled_at) if scheduled_at is not None and ended_at is not None else 0.0
