"""Conditions, and events for their transitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rljob.api.job_status import Condition, RLJobStatus
from rljob.api.text_escape import escape_block
from rljob.operator.plan import Event
from rljob.operator.planning import reasons
from rljob.operator.planning.plan_builder import PlanBuilder

Type = Literal["Ready", "Initialized", "Suspended", "Complete", "Failed", "Stalled"]
ORDER: Sequence[Type] = ("Ready", "Initialized", "Suspended", "Complete", "Failed", "Stalled")
MAX_MESSAGE_CHARACTERS = 4096
NORMAL = frozenset(
    {
        reasons.INITIALIZING,
        reasons.STARTING,
        reasons.RUNNING,
        reasons.EVALUATING,
        reasons.FINISHING,
        reasons.SUSPENDING,
        reasons.SUSPENDED,
        reasons.RESUMED,
        reasons.SUCCEEDED,
        reasons.INITIALIZED,
        reasons.NO_INITIALIZER,
        reasons.PODS_NOT_READY,
    }
)
"""Reasons of normal operation: their events have the type Normal."""
_SILENT = frozenset({(reasons.NO_INITIALIZER, "True"), (reasons.INITIALIZING, "False")})


def find(status: RLJobStatus, kind: Type) -> Condition | None:
    """Return a condition; None if it does not exist."""
    return next((each for each in status.conditions if each.type == kind), None)


def is_true(status: RLJobStatus, kind: Type) -> bool:
    """Return whether a condition exists and is true."""
    found = find(status, kind)
    return found is not None and found.status == "True"


def set_condition(builder: PlanBuilder, kind: Type, true: bool, reason: str, message: str) -> None:
    """Set a condition; lastTransitionTime changes only with its status."""
    before = find(builder.status, kind)
    value: Literal["True", "False"] = "True" if true else "False"
    message = escape_block(message)[:MAX_MESSAGE_CHARACTERS]
    generation = builder.observed.metadata.generation
    if before is not None and before.status == value and before.reason == reason and before.message == message:
        if before.observed_generation == generation:
            return
        after = before.model_copy(update={"observed_generation": generation})
    else:
        since = before.last_transition_time if before is not None and before.status == value else builder.instant
        after = Condition(
            type=kind,
            status=value,
            reason=reason,
            message=message,
            last_transition_time=since,
            observed_generation=generation,
        )
    others = {each.type: each for each in builder.status.conditions}
    others[kind] = after
    builder.status.conditions = [others[each] for each in ORDER if each in others]


def set_stalled(builder: PlanBuilder) -> None:
    """Set Stalled while only a user can help: the job has failed, or its spec is not valid.

    Flux, Argo CD and `kubectl rollout`-like tools (kstatus) read Stalled=True as failed, and Ready=True as done.
    """
    failed, ready = find(builder.status, "Failed"), find(builder.status, "Ready")
    if failed is not None and failed.status == "True":
        set_condition(builder, "Stalled", True, failed.reason, failed.message)
    elif ready is not None and ready.reason == reasons.INVALID_SPEC:
        set_condition(builder, "Stalled", True, ready.reason, ready.message)
    else:
        builder.status.conditions = [each for each in builder.status.conditions if each.type != "Stalled"]


def transitions(before: RLJobStatus, after: RLJobStatus) -> list[Event]:
    """Return an event for every condition whose status or reason has changed.

    One event per transition: Ready does not repeat Complete, Failed, Suspended or Initialized, and Stalled repeats one
    of them always.
    """
    changed = [each for each in after.conditions if _differs(find(before, each.type), each)]
    events: list[Event] = []
    for condition in sorted(changed, key=lambda each: each.type == "Ready"):
        reason = condition.reason
        if condition.type == "Stalled":
            continue
        if condition.type == "Initialized" and (reason, condition.status) in _SILENT:
            continue
        if condition.type == "Ready" and (reason == reasons.FAILED or any(reason == each.reason for each in events)):
            continue
        events.append(Event("Normal" if reason in NORMAL else "Warning", reason, condition.message))
    return events


def _differs(before: Condition | None, after: Condition) -> bool:
    return before is None or (before.status, before.reason) != (after.status, after.reason)
