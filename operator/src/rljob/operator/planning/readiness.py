"""The Ready condition: its reason and its message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rljob.api.job_status import Attempt, RunState
from rljob.operator.plan import TRAINER, Ref
from rljob.operator.planning import pod_diagnosis, reasons
from rljob.operator.planning.initializer_stage import InitializerStage
from rljob.operator.planning.role_status import RoleProblem

STATES = {"Running": reasons.RUNNING, "Evaluating": reasons.EVALUATING, "Finishing": reasons.FINISHING}
"""States of a running run → reason."""
_URGENT = pod_diagnosis.SEVERITY.index(reasons.VOLUME_CLAIM_PENDING)
"""Severity from which a user must act."""


@dataclass(frozen=True)
class Readiness:
    """The Ready condition."""

    ready: bool
    reason: str
    message: str


def of_job(
    stage: InitializerStage,
    problems: Sequence[RoleProblem],
    attempt: Attempt | None,
    run: RunState | None,
    foreign: Mapping[Ref, str],
    refused: Mapping[Ref, str],
) -> Readiness:
    """Return the readiness of a job that is neither suspended nor ended."""
    obstacle = blocked(foreign, refused)
    if obstacle is not None:
        return obstacle
    if not stage.done:
        if stage.problem is not None and stage.problem.reason != reasons.PODS_NOT_READY:
            return Readiness(False, stage.problem.reason, stage.problem.text)
        return Readiness(False, stage.reason, stage.message)
    essential = sorted((problem for problem in problems if problem.essential), key=lambda problem: -problem.severity)
    if not essential:
        return _under_way(run, problems)
    worst = essential[0]
    held = {problem.reason for problem in essential if problem.role == TRAINER}  # pending pods need a user
    restarting = attempt is not None and attempt.cause and held and reasons.PODS_PENDING not in held
    if restarting and worst.severity < _URGENT:
        assert attempt is not None
        return Readiness(False, reasons.TRAINER_RESTARTING, _restarting(attempt))
    # Roles that are merely starting are not counted beside a role that a user must look at.
    held_up = [each for each in essential if each.reason != reasons.PODS_NOT_READY] or essential
    message = worst.text + _others(len(held_up) - 1, "role", "not ready")
    if worst.reason == reasons.PODS_NOT_READY and not (run is not None and run.state in STATES):
        return Readiness(False, reasons.STARTING, message)
    return Readiness(False, worst.reason, message)


def blocked(foreign: Mapping[Ref, str], refused: Mapping[Ref, str]) -> Readiness | None:
    """Return the readiness of a job with objects that cannot be created; None if it has none."""
    if foreign:
        first = foreign[min(foreign)]
        return Readiness(False, reasons.NAME_CONFLICT, first + _others(len(foreign) - 1, "object", "taken"))
    if refused:
        kind, name = ref = min(refused)
        pod_problem = pod_diagnosis.refusal(refused[ref])
        reason = reasons.QUOTA_EXCEEDED if pod_problem.reason == reasons.QUOTA_EXCEEDED else reasons.API_REJECTED
        text = f"{kind} {name} cannot be made: {pod_problem.text}"
        return Readiness(False, reason, text + _others(len(refused) - 1, "object", "refused"))
    return None


def _under_way(run: RunState | None, problems: Sequence[RoleProblem]) -> Readiness:
    more = "".join(f"; {problem.text}" for problem in problems)
    message = f"; {run.message}" if run is not None and run.message else ""  # a pod is ready before its component is
    if run is None or run.state not in STATES:
        return Readiness(
            False, reasons.STARTING, f"all roles are ready{message or ', the first batch is being made'}{more}"
        )
    return Readiness(True, STATES[run.state], f"all roles are ready{message}{more}")


def _restarting(attempt: Attempt) -> str:
    begins = f"begins at {attempt.not_before}" if attempt.not_before else "begins"
    return f"attempt {attempt.number} of the trainer {begins}; attempt {attempt.number - 1} ended: {attempt.cause}"


def _others(count: int, noun: str, what: str) -> str:
    if count <= 0:
        return ""
    return f"; {count} more {noun}s are {what}" if count > 1 else f"; 1 more {noun} is {what}"
