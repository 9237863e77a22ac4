"""Decides attempts of the trainer. It fails as a group; the next attempt is recorded before its Job is created.

The cause of an attempt's end determines its cost. A disruption, a deleted Job, a resume and a change of the trainer's
fields are free. Exit code 2 ends the run. Every other cause counts against failurePolicy.maxRestarts, minus one for
every FORGIVENESS_SECONDS seconds of work, and is backed off.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rljob.api.job_status import Attempt
from rljob.api.run_policy import FailurePolicy
from rljob.manifests.names import ATTEMPT, ROLE, object_name
from rljob.operator.api_types import Child, Pod
from rljob.operator.plan import TRAINER, Observed, Ref
from rljob.operator.planning.container_exits import (
    CONFIGURATION_ERROR,
    began,
    describe,
    end_lag_left,
    ends,
    first_failure,
    with_last_line,
    with_log_end,
)
from rljob.operator.planning.job_view import DISRUPTED, condition, controller, is_disrupted, role_of
from rljob.operator.planning.lost_nodes import seconds_until_lost
from rljob.operator.planning.timestamps import age, instant, remaining, seconds_of

MAX_BACK_OFF_SECONDS = 60.0
FORGIVENESS_SECONDS = 600.0
"""Seconds of work of an attempt that offset one earlier failure."""
QUICK_END_SECONDS = 10.0
"""The attempt after a free end within this time is backed off too, as the cause may repeat."""
DONE_GRACE_SECONDS = 30.0
"""Seconds that the coordinator has to report the end of the run after the trainer exited with code 0."""
MAX_CAUSE_CHARACTERS = 1000
_EXIT_2 = re.compile(rf"\bexit code {CONFIGURATION_ERROR}\b")

Cost = Literal["free", "charged", "fatal"]


@dataclass(frozen=True)
class AttemptEnd:
    """Why and when an attempt ended (Unix seconds), and its cost."""

    cost: Cost
    why: str
    at: float
    exit: str = ""
    began: float = -math.inf
    """When the last of the attempt's pods started, if known: time without a node is not counted as work."""


@dataclass(frozen=True)
class AttemptDecision:
    """Decision about an attempt. ``attempt``: the current or a new attempt; ``ending``: end of the previous attempt, if
    ``attempt`` is new; ``over``: reason and message if no attempt may follow; ``requeue_after``: seconds, 0: never."""

    attempt: Attempt
    ending: AttemptEnd | None = None
    over: tuple[str, str] | None = None
    requeue_after: float = 0.0


def jobs(observed: Observed) -> dict[int, Child]:
    """Return attempt number → Job of the trainer."""
    found = {}
    for (kind, name), child in observed.children.items():
        if kind == "Job" and role_of(child) == TRAINER:
            number = child.metadata.labels.get(ATTEMPT) or name.rpartition("-")[2]
            if number.isdigit():
                found[int(number)] = child
    return found


def current_attempt(observed: Observed) -> Attempt | None:
    """Return the current attempt; None before the first.

    If a Job has a higher number than the status, the status was restored from an older copy. Attempts then continue
    from the number of the Job, because a number is never used twice.
    """
    recorded = observed.status.trainer
    highest = max(jobs(observed), default=0)
    if recorded is not None and recorded.number >= highest:
        return recorded
    if recorded is None and not highest:
        return None
    base = recorded or Attempt(started_at=instant(observed.now))
    return base.model_copy(update={"number": highest, "not_before": None, "job_uid": ""})


def orphaned_jobs(observed: Observed, before: float = math.inf) -> dict[Ref, str]:
    """Return Job → uid of attempts before ``before`` that have pods although the Job is not observed.

    The Job has lost its label, or it was deleted and its pods are being deleted: deleting the Job again is harmless.
    """
    known_uids = {child.metadata.uid for child in jobs(observed).values()}
    found: dict[Ref, str] = {}
    for pod in observed.pods:
        labels, owner = pod.metadata.labels, controller(pod)
        if labels.get(ROLE) != TRAINER or owner is None or owner.uid in known_uids or pod.metadata.deletion_timestamp:
            continue
        number = labels.get(ATTEMPT, "")
        ours = owner.kind == "Job" and owner.name == object_name(observed.metadata.name, TRAINER, number)
        if ours and number.isdigit() and int(number) < before:
            found["Job", owner.name] = owner.uid
    return found


def decide(observed: Observed, attempt: Attempt, role_hash: str, policy: FailurePolicy) -> AttemptDecision:
    """Return the decision about ``attempt``. ``role_hash``: of the trainer's current inputs."""
    now = observed.now
    job = jobs(observed).get(attempt.number)
    if attempt.role_hash and attempt.role_hash != role_hash:
        changed = AttemptEnd("free", "spec.trainer was changed", now)
        return AttemptDecision(next_attempt(attempt, now, role_hash, changed.why), changed)
    if job is None or job.metadata.deletion_timestamp is not None:
        if job is None and not attempt.job_uid and not _had_job(observed, attempt):
            return AttemptDecision(attempt, requeue_after=back_off_left(attempt, now))
        ending = AttemptEnd("free", "its Job was deleted", now)
    else:
        if attempt.job_uid != job.metadata.uid or not attempt.role_hash:
            attempt = attempt.model_copy(update={"job_uid": job.metadata.uid, "role_hash": role_hash})
        pods = pods_of(observed, attempt, job)
        ended = _ended(job, pods, now)
        if ended is None:
            return AttemptDecision(attempt, requeue_after=_next_deadline(job, pods, now))
        begins = [begin for pod in pods if (begin := began(pod)) is not None]
        ending = replace(ended, began=max(begins, default=-math.inf))
    return _decision_after(attempt, ending, role_hash, policy, now)


def pods_of(observed: Observed, attempt: Attempt, job: Child) -> list[Pod]:
    """Return the pods of an attempt by name, including those with a deletionTimestamp."""
    number = str(attempt.number)
    pods = [
        pod
        for pod in observed.pods
        if pod.metadata.labels.get(ROLE) == TRAINER
        and pod.metadata.labels.get(ATTEMPT, number) == number
        and all(owner.uid == job.metadata.uid for owner in pod.metadata.owner_references)
    ]
    return sorted(pods, key=lambda pod: pod.metadata.name)


def _had_job(observed: Observed, attempt: Attempt) -> bool:
    """Return whether an attempt without a recorded Job had a Job: it has pods."""
    number = str(attempt.number)
    return any(
        pod.metadata.labels.get(ROLE) == TRAINER and pod.metadata.labels.get(ATTEMPT) == number for pod in observed.pods
    )


def next_attempt(
    attempt: Attempt, now: float, role_hash: str, cause: str = "", back_off: float = 0.0, charged: float | None = None
) -> Attempt:
    """Return the attempt after ``attempt``, which ended because of ``cause``; it starts after ``back_off`` seconds."""
    return Attempt(
        number=attempt.number + 1,
        started_at=instant(now),
        not_before=instant(math.ceil(now + back_off)) if back_off else None,
        charged=attempt.charged if charged is None else charged,
        role_hash=role_hash,
        cause=cause[:MAX_CAUSE_CHARACTERS],
    )


def back_off_left(attempt: Attempt, now: float) -> float:
    """Return the seconds until an attempt may start; 0 if it may start now, or if the clock was set back."""
    if attempt.not_before is None or (seconds_of(attempt.started_at) or 0.0) > now:
        return 0.0
    return max(0.0, remaining(attempt.not_before, 0.0, now))


def _decision_after(
    attempt: Attempt, ending: AttemptEnd, role_hash: str, policy: FailurePolicy, now: float
) -> AttemptDecision:
    decided = seconds_of(attempt.started_at) or 0.0
    begun = max(decided, seconds_of(attempt.not_before or "") or 0.0)
    lived = max(0.0, ending.at - begun)
    worked = max(0.0, ending.at - max(begun, ending.began))
    charged = max(0.0, round(attempt.charged - worked / FORGIVENESS_SECONDS, 3))
    if ending.cost == "fatal":
        return AttemptDecision(
            attempt, ending, ("ConfigurationError", f"the trainer rejects its configuration: {ending.why}")
        )
    if ending.cost == "free":
        back_off = min(MAX_BACK_OFF_SECONDS, max(1.0, 2 * (begun - decided))) if lived < QUICK_END_SECONDS else 0.0
        return AttemptDecision(
            next_attempt(attempt, now, role_hash, ending.why, back_off, charged), ending, requeue_after=back_off
        )
    charged += 1
    if charged > policy.max_restarts:
        exceeded = f"and exceeded spec.failurePolicy.maxRestarts ({policy.max_restarts})"
        return AttemptDecision(attempt, ending, ("MaxRestartsExceeded", f"the trainer failed {exceeded}: {ending.why}"))
    back_off = min(MAX_BACK_OFF_SECONDS, 2.0 ** min(6, math.ceil(charged) - 1))
    return AttemptDecision(
        next_attempt(attempt, now, role_hash, ending.why, back_off, charged), ending, requeue_after=back_off
    )


def _ended(job: Child, pods: Sequence[Pod], now: float) -> AttemptEnd | None:
    """Return how the attempt ended; None while it runs.

    A Job reports its failure (FailureTarget) before its last pod has ended; a pod on a lost node never ends.
    """
    failed = condition(job, "Failed", "FailureTarget")
    if failed is not None:
        return _failed(failed, pods, now)
    done = condition(job, "Complete", "SuccessCriteriaMet")
    if done is not None and age(done.get("lastTransitionTime"), now) >= DONE_GRACE_SECONDS:
        return AttemptEnd("charged", "exit code 0 before the end of the run", _time_of(done, now), "exit code 0")
    lost = next((pod for pod in pods if seconds_until_lost(pod, now) <= 0), None)
    if lost is not None:
        return AttemptEnd("free", f"pod {lost.metadata.name} on node {lost.spec.node_name} is lost", now, "node lost")
    return None


def _failed(failed: dict[str, Any], pods: Sequence[Pod], now: float) -> AttemptEnd | None:
    message, at = str(failed.get("message", "")), _time_of(failed, now)
    by_rule = failed.get("reason") == "PodFailurePolicy"
    refused = next((end for _, end in ends(pods) if end.exit_code == CONFIGURATION_ERROR), None)
    if refused is not None:
        return AttemptEnd("fatal", with_log_end(refused), at, describe(refused))
    unseen = end_lag_left(pods, failed, now) > 0
    if by_rule and _EXIT_2.search(message):
        return None if unseen else AttemptEnd("fatal", message, at, "exit code 2")
    disrupted = next((pod for pod in pods if is_disrupted(pod)), None)
    if disrupted is not None or (by_rule and DISRUPTED in message):
        return AttemptEnd("free", _disruption(disrupted, message), at, "disrupted")
    first = first_failure(pods)
    if first is not None:
        pod, end = first
        return AttemptEnd("charged", f"pod {pod.metadata.name}: {with_last_line(end)}", at, describe(end))
    return None if unseen else AttemptEnd("charged", message or "its Job failed", at)


def _disruption(pod: Pod | None, message: str) -> str:
    if pod is None:
        return f"disrupted: {message}"
    why = next(each for each in pod.status.conditions if each.type == DISRUPTED)
    return f"pod {pod.metadata.name} was disrupted ({why.reason or DISRUPTED})"


def _time_of(condition: dict[str, Any], now: float) -> float:
    at = seconds_of(str(condition.get("lastTransitionTime", "")))
    return now if at is None else at


def _next_deadline(job: Child, pods: Sequence[Pod], now: float) -> float:
    delays = [seconds_until_lost(pod, now) for pod in pods]
    failed = condition(job, "Failed", "FailureTarget")
    if failed is not None:
        delays.append(end_lag_left(pods, failed, now))
    done = condition(job, "Complete", "SuccessCriteriaMet")
    if done is not None:
        delays.append(remaining(done.get("lastTransitionTime"), DONE_GRACE_SECONDS, now))
    soonest = min(delays, default=math.inf)
    return soonest if math.isfinite(soonest) else 0.0
