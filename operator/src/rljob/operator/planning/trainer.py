"""Attempts of the trainer: it fails as a group, and the next attempt is decided on and recorded before it is made.

What ended an attempt decides what it costs. A disruption, a Job that somebody deleted, a resume and a change of the
trainer's fields are free. Exit code 2 ends the run. All else counts against failurePolicy.maxRestarts, less what long
lives forgive, and is backed off.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rljob.api.run_policy import FailurePolicy
from rljob.api.status import Attempt
from rljob.manifests.names import ATTEMPT, ROLE, object_name
from rljob.operator.plan import Observed, Ref
from rljob.operator.planning import exits
from rljob.operator.planning.scene import DISRUPTED, condition, controller, is_disrupted, role_of
from rljob.operator.planning.times import age, instant, remaining, seconds_of
from rljob.operator.seen import Child, Pod

TRAINER = "trainer"
LONGEST_BACK_OFF = 60.0
FORGIVING_LIFE = 600.0
"""Seconds of an attempt's life that forgive one earlier death."""
QUICK_LIFE = 10.0
"""A free attempt that ended sooner is backed off all the same: something goes wrong again and again."""
LOST_AFTER = 30.0
"""Seconds after the end of its grace that a pod which is still there is on a node that is lost."""
DONE_GRACE = 30.0
"""Seconds that the coordinator has to say that the run is over, once the trainer ended with exit code 0."""
LONGEST_CAUSE = 1000
_EXIT_2 = re.compile(rf"\bexit code {exits.CONFIGURATION_ERROR}\b")

Cost = Literal["free", "charged", "fatal"]


@dataclass(frozen=True)
class Ending:
    """Why an attempt is over, what it costs, and when it was (Unix seconds)."""

    cost: Cost
    why: str
    at: float
    exit: str = ""
    began: float = -math.inf
    """When the last of the attempt's pods began, as far as that is known: waiting for a node is no life."""


@dataclass(frozen=True)
class Verdict:
    """What becomes of the attempt. ``ending`` of the one before if ``attempt`` is a new one; ``over`` if no other may
    follow: reason and message; ``look_again`` in seconds if something becomes due."""

    attempt: Attempt
    ending: Ending | None = None
    over: tuple[str, str] | None = None
    look_again: float = 0.0


def jobs(observed: Observed) -> dict[int, Child]:
    """Return the trainer's Jobs by the number of their attempt."""
    found = {}
    for (kind, name), child in observed.children.items():
        if kind == "Job" and role_of(child) == TRAINER:
            number = child.metadata.labels.get(ATTEMPT) or name.rpartition("-")[2]
            if number.isdigit():
                found[int(number)] = child
    return found


def present(observed: Observed) -> Attempt | None:
    """Return the attempt that is under way; None before the first.

    A Job of a later attempt than the status knows of says that the status is a copy of an earlier day: the attempts
    go on from there, as a number is never used twice.
    """
    recorded = observed.status.trainer
    highest = max(jobs(observed), default=0)
    if recorded is not None and recorded.number >= highest:
        return recorded
    if recorded is None and not highest:
        return None
    base = recorded or Attempt(started_at=instant(observed.now))
    return base.model_copy(update={"number": highest, "not_before": None, "job_uid": ""})


def strays(observed: Observed, before: float = math.inf) -> dict[Ref, str]:
    """Return Job → uid of attempts before ``before`` that still have pods though the Job is not to be seen.

    Somebody took its label away, or it is gone and its pods go soon: having it deleted does no harm then.
    """
    seen = {child.metadata.uid for child in jobs(observed).values()}
    found: dict[Ref, str] = {}
    for pod in observed.pods:
        labels, owner = pod.metadata.labels, controller(pod)
        if labels.get(ROLE) != TRAINER or owner is None or owner.uid in seen or pod.metadata.deletion_timestamp:
            continue
        number = labels.get(ATTEMPT, "")
        ours = owner.kind == "Job" and owner.name == object_name(observed.metadata.name, TRAINER, number)
        if ours and number.isdigit() and int(number) < before:
            found["Job", owner.name] = owner.uid
    return found


def decide(observed: Observed, attempt: Attempt, role_hash: str, policy: FailurePolicy) -> Verdict:
    """Return what becomes of ``attempt``, given the hash of the inputs that the trainer has now."""
    now = observed.now
    job = jobs(observed).get(attempt.number)
    if attempt.role_hash and attempt.role_hash != role_hash:
        changed = Ending("free", "spec.trainer was changed", now)
        return Verdict(following(attempt, now, role_hash, changed.why), changed)
    if job is None or job.metadata.deletion_timestamp is not None:
        if job is None and not attempt.job_uid and not _was_made(observed, attempt):
            return Verdict(attempt, look_again=back_off_left(attempt, now))
        ending = Ending("free", "its Job was deleted", now)
    else:
        if attempt.job_uid != job.metadata.uid or not attempt.role_hash:
            attempt = attempt.model_copy(update={"job_uid": job.metadata.uid, "role_hash": role_hash})
        pods = pods_of(observed, attempt, job)
        ended = _ended(job, pods, now)
        if ended is None:
            return Verdict(attempt, look_again=_next_moment(job, pods, now))
        begins = [begin for pod in pods if (begin := exits.began(pod)) is not None]
        ending = replace(ended, began=max(begins, default=-math.inf))
    return _after(attempt, ending, role_hash, policy, now)


def pods_of(observed: Observed, attempt: Attempt, job: Child) -> list[Pod]:
    """Return the pods of an attempt, also those that are being deleted, by name."""
    number = str(attempt.number)
    pods = [
        pod
        for pod in observed.pods
        if pod.metadata.labels.get(ROLE) == TRAINER
        and pod.metadata.labels.get(ATTEMPT, number) == number
        and all(owner.uid == job.metadata.uid for owner in pod.metadata.owner_references)
    ]
    return sorted(pods, key=lambda pod: pod.metadata.name)


def _was_made(observed: Observed, attempt: Attempt) -> bool:
    """Return whether an attempt whose Job is not recorded had one: pods of it are left."""
    number = str(attempt.number)
    return any(
        pod.metadata.labels.get(ROLE) == TRAINER and pod.metadata.labels.get(ATTEMPT) == number for pod in observed.pods
    )


def following(
    attempt: Attempt, now: float, role_hash: str, cause: str = "", back_off: float = 0.0, charged: float | None = None
) -> Attempt:
    """Return the next attempt after ``attempt``, which ended for ``cause``, to begin after ``back_off`` seconds."""
    return Attempt(
        number=attempt.number + 1,
        started_at=instant(now),
        not_before=instant(math.ceil(now + back_off)) if back_off else None,
        charged=attempt.charged if charged is None else charged,
        role_hash=role_hash,
        cause=cause[:LONGEST_CAUSE],
    )


def back_off_left(attempt: Attempt, now: float) -> float:
    """Return the seconds until an attempt may begin; 0 once it may, and when the clock was set back meanwhile."""
    if attempt.not_before is None or (seconds_of(attempt.started_at) or 0.0) > now:
        return 0.0
    return max(0.0, remaining(attempt.not_before, 0.0, now))


def _after(attempt: Attempt, ending: Ending, role_hash: str, policy: FailurePolicy, now: float) -> Verdict:
    decided = seconds_of(attempt.started_at) or 0.0
    begun = max(decided, seconds_of(attempt.not_before or "") or 0.0)
    lived = max(0.0, ending.at - begun)
    worked = max(0.0, ending.at - max(begun, ending.began))
    charged = max(0.0, round(attempt.charged - worked / FORGIVING_LIFE, 3))
    if ending.cost == "fatal":
        return Verdict(attempt, ending, ("ConfigurationError", f"the trainer refuses its configuration: {ending.why}"))
    if ending.cost == "free":
        back_off = min(LONGEST_BACK_OFF, max(1.0, 2 * (begun - decided))) if lived < QUICK_LIFE else 0.0
        return Verdict(following(attempt, now, role_hash, ending.why, back_off, charged), ending, look_again=back_off)
    charged += 1
    if charged > policy.max_restarts:
        had = f"and had its {policy.max_restarts} restarts (spec.failurePolicy.maxRestarts)"
        return Verdict(attempt, ending, ("MaxRestartsExceeded", f"the trainer failed {had}: {ending.why}"))
    back_off = min(LONGEST_BACK_OFF, 2.0 ** min(6, math.ceil(charged) - 1))
    return Verdict(following(attempt, now, role_hash, ending.why, back_off, charged), ending, look_again=back_off)


def _ended(job: Child, pods: Sequence[Pod], now: float) -> Ending | None:
    """Return how the attempt ended; None while it goes on.

    A Job says that it will fail (FailureTarget) before its last pod is gone, which on a lost node is never.
    """
    failed = condition(job, "Failed", "FailureTarget")
    if failed is not None:
        return _failed(failed, pods, now)
    done = condition(job, "Complete", "SuccessCriteriaMet")
    if done is not None and age(done.get("lastTransitionTime"), now) >= DONE_GRACE:
        return Ending("charged", "exit code 0 before the run was over", _time_of(done, now), "exit code 0")
    lost = next((pod for pod in pods if _lost_in(pod, now) <= 0), None)
    if lost is not None:
        return Ending("free", f"pod {lost.metadata.name} on node {lost.spec.node_name} is lost", now, "node lost")
    return None


def _failed(failed: dict[str, Any], pods: Sequence[Pod], now: float) -> Ending:
    message, at = str(failed.get("message", "")), _time_of(failed, now)
    by_rule = failed.get("reason") == "PodFailurePolicy"
    refused = next((found for found in exits.ends(pods) if found[1].exit_code == exits.CONFIGURATION_ERROR), None)
    if refused is not None or (by_rule and _EXIT_2.search(message)):
        why = exits.with_log_end(refused[1]) if refused else message
        return Ending("fatal", why, at, exits.describe(refused[1]) if refused else "exit code 2")
    disrupted = next((pod for pod in pods if is_disrupted(pod)), None)
    if disrupted is not None or (by_rule and DISRUPTED in message):
        return Ending("free", _disruption(disrupted, message), at, "disrupted")
    first = exits.culprit(pods)
    if first is None:
        return Ending("charged", message or "its Job failed", at)
    pod, end = first
    return Ending("charged", f"pod {pod.metadata.name}: {exits.with_last_words(end)}", at, exits.describe(end))


def _disruption(pod: Pod | None, message: str) -> str:
    if pod is None:
        return f"disrupted: {message}"
    why = next(each for each in pod.status.conditions if each.type == DISRUPTED)
    return f"pod {pod.metadata.name} was disrupted ({why.reason or DISRUPTED})"


def _time_of(condition: dict[str, Any], now: float) -> float:
    at = seconds_of(str(condition.get("lastTransitionTime", "")))
    return now if at is None else at


def _lost_in(pod: Pod, now: float) -> float:
    """Return the seconds until a pod that is being deleted counts as lost."""
    if pod.metadata.deletion_timestamp is None or pod.status.phase in ("Failed", "Succeeded"):
        return math.inf
    return remaining(pod.metadata.deletion_timestamp, LOST_AFTER, now)


def _next_moment(job: Child, pods: Sequence[Pod], now: float) -> float:
    moments = [_lost_in(pod, now) for pod in pods]
    done = condition(job, "Complete", "SuccessCriteriaMet")
    if done is not None:
        moments.append(remaining(done.get("lastTransitionTime"), DONE_GRACE, now))
    soonest = min(moments, default=math.inf)
    return soonest if math.isfinite(soonest) else 0.0
