"""Admission of a job by Kueue: what its Workload says, and what the operator does in answer.

The operator is a framework that Kueue does not know: it writes one Workload, creates no pod until the Workload is
admitted, and stops the job when Kueue evicts it. An evicted Workload keeps its quota until its framework says that the
pods are gone: the operator then takes the reservation out of the status, and Kueue queues the Workload again. Pods on
lost nodes, which terminate for ever, count as gone.

Source: the reconciler of Kueue's job framework (steps 1, 6, 7 and 8), for kueue.x-k8s.io/v1beta2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rljob.manifests.gang import GROUP
from rljob.manifests.inputs import Flavor, Object
from rljob.manifests.names import DEMAND_HASH, gang_name
from rljob.operator.api_types import Child
from rljob.operator.object_kinds import KUEUE_WORKLOADS
from rljob.operator.plan import Observed, Ref
from rljob.operator.planning import conditions, lost_nodes, readiness, reasons, suspension
from rljob.operator.planning.job_view import JobView, workloads
from rljob.operator.planning.plan_builder import PlanBuilder

PREEMPTED = "Preempted"
"""Reason of an eviction after which Kueue queues the Workload at once; after others it decides itself when."""
CREATED_SECONDS = 1.0
"""After it a job says what its new Workload waits for; no event follows the creation while Kueue is away."""
PRIORITY_SECONDS = 60.0
"""A job that waits reads the value of its PriorityClass again after it; no event reports a new value."""
PODS_READY = "PodsReady"
"""Condition by which Kueue evicts a job whose pods do not become ready in time, where it is configured to."""


@dataclass(frozen=True)
class Admission:
    """Whether a job may have pods, and why not."""

    admitted: bool
    message: str
    workload: Child | None = None
    outdated: bool = False
    """The Workload was admitted for other pods than the manifest demands now."""
    evicted: bool = False
    reserved: bool = False
    """Its pod sets cannot be changed."""


def workload_of(observed: Observed) -> Child | None:
    """Return the job's Workload, unless it is being deleted."""
    child = observed.children.get(_ref(observed))
    return None if child is None or child.metadata.deletion_timestamp is not None else child


def flavor_names(child: Child | None) -> frozenset[str]:
    """Return the ResourceFlavors that an admitted Workload has been assigned."""
    return frozenset(name for names in _assigned(child).values() for name in names)


class MissingFlavorError(Exception):
    """A ResourceFlavor cannot be read."""


def flavors_of_roles(observed: Observed) -> dict[str, Flavor]:
    """Return role → what the ResourceFlavors that Kueue assigned to it add to its pods.

    Raises:
        MissingFlavorError: a ResourceFlavor cannot be read.
    """
    found = {}
    for role, names in _assigned(workload_of(observed)).items():
        flavors = []
        for name in names:
            if name not in observed.flavors:
                raise MissingFlavorError(
                    f"ResourceFlavor {name} of Kueue cannot be read; it was deleted, or the operator has no right to "
                    "get resourceflavors of kueue.x-k8s.io"
                )
            flavors.append(observed.flavors[name])
        labels = {key: value for flavor in flavors for key, value in flavor.node_labels.items()}
        tolerations = tuple(each for flavor in flavors for each in flavor.tolerations)
        if labels or tolerations:
            found[role] = Flavor(labels, tolerations)
    return found


def read(view: JobView) -> Admission:
    """Return what the Workload of a job says."""
    child, queue = workload_of(view.observed), view.job.spec.scheduling.gang.queue
    if child is None:
        return Admission(False, f"the Workload for LocalQueue {queue} of Kueue is being created")
    if evicted := _eviction(child):
        return Admission(False, evicted, child, evicted=True)
    name, reserved = child.metadata.name, _is_reserved(child)
    if reserved and not _demands_the_same(view, child):
        return Admission(
            False, f"Workload {name} was admitted for other pods; the job is queued again", child, outdated=True
        )
    if _true(child, "Admitted") is None:
        return Admission(False, _waits(child, str(queue)), child, reserved=reserved)
    return Admission(True, f"Workload {name} is admitted", child)


def _demands_the_same(view: JobView, child: Child) -> bool:
    """Return whether a Workload is for the pods that the manifest demands."""
    role = view.role(GROUP)
    assert role is not None, "Kueue has a Workload"
    return bool(
        child.metadata.annotations.get(DEMAND_HASH) == role.objects[0]["metadata"]["annotations"].get(DEMAND_HASH)
    )


def wait(builder: PlanBuilder, view: JobView, admission: Admission) -> None:
    """Stop a job that has lost its admission, with a checkpoint; start nothing of a job that has none yet."""
    status, observed = builder.status, builder.observed
    if workloads(observed) or lost_nodes.occupying(builder):
        suspension.suspend(builder, view, admission.message)
        return
    if admission.evicted and admission.workload is not None:
        builder.status_patches.append((_ref(observed), _released(admission.workload, builder.instant)))
    if admission.outdated and admission.workload is not None:
        builder.delete([admission.workload])
    elif not admission.evicted and not admission.reserved:
        role = view.role(GROUP)
        assert role is not None, "Kueue has a Workload"
        builder.desired.extend(role.objects)
        if admission.workload is None:
            builder.requeue_after(CREATED_SECONDS)
        if view.job.spec.scheduling.priority_class_name:
            builder.requeue_after(PRIORITY_SECONDS)
    blocked = readiness.blocked(observed.conflicts, observed.refused)
    reason, message = (blocked.reason, blocked.message) if blocked else (reasons.QUEUED, admission.message)
    if suspension.is_suspended(status):
        conditions.set_condition(builder, "Suspended", True, reasons.SUSPENDED, admission.message)
    if not conditions.is_true(status, "Initialized"):
        conditions.set_condition(builder, "Initialized", False, reasons.QUEUED, admission.message)
    conditions.set_condition(builder, "Ready", False, reason, message)


def stop_rejected(builder: PlanBuilder) -> str:
    """Stop a job whose spec is rejected if Kueue has evicted it, or if its Workload was deleted.

    The Workload is deleted when the pods are gone: with it the job would be admitted again, and could not start.

    Returns:
        Why; empty if nothing is stopped.
    """
    observed, child = builder.observed, workload_of(builder.observed)
    if builder.status.gang_provider != "kueue":
        return ""
    evicted = _eviction(child) if child is not None else f"Workload {gang_name(observed.metadata.name)} was deleted"
    if not evicted:
        return ""
    if workloads(observed) or lost_nodes.occupying(builder):
        suspension.suspend(builder, None, evicted)
        return evicted
    if child is not None:
        builder.delete([child])
    if suspension.is_suspended(builder.status):
        conditions.set_condition(builder, "Suspended", True, reasons.SUSPENDED, "a valid spec is queued again")
    return ""


def report_ready(builder: PlanBuilder, admission: Admission, ready: bool) -> None:
    """Tell Kueue whether the pods of an admitted job are ready, if that differs from what it knows.

    Without the condition it counts the time until all pods are ready from the admission.
    """
    child = admission.workload
    if child is None or not admission.admitted or (_true(child, PODS_READY) is not None) == ready:
        return
    reason, message = ("Started", "all pods are ready") if ready else ("WaitForRecovery", "not all pods are ready")
    changed = _with_conditions(child, builder.instant, {PODS_READY: (ready, reason, message)})
    builder.status_patches.append((_ref(builder.observed), {"conditions": changed}))


def _is_reserved(child: Child) -> bool:
    return _true(child, "QuotaReserved") is not None


def _eviction(child: Child) -> str:
    """Return by what Kueue has evicted a Workload that still holds its quota; empty if it has not."""
    evicted = _true(child, "Evicted")
    if evicted is None or not _is_reserved(child):
        return ""
    cause = f"{evicted.get('reason', '')}: {evicted.get('message', '')}".strip(": ")
    return f"Kueue has evicted Workload {child.metadata.name}: {cause}"


def _released(child: Child, instant: str) -> Object:
    """Return the change of a Workload's status that gives its reservation back: its pods are gone."""
    evicted = _true(child, "Evicted") or {}
    reason, message = str(evicted.get("reason", "")), str(evicted.get("message", ""))
    changed = _with_conditions(
        child,
        instant,
        {
            "QuotaReserved": (False, "Pending", message),
            "Admitted": (False, "NoReservation", "The workload has no reservation"),
            "Requeued": (reason == PREEMPTED, reason or "Pending", message),
        },
    )
    return {"admission": None, "conditions": changed}


def _with_conditions(child: Child, instant: str, changes: Mapping[str, tuple[bool, str, str]]) -> list[Object]:
    """Return all conditions of a Workload with some changed: type → status, reason, message."""
    found: dict[str, Object] = {each["type"]: each for each in child.body.get("status", {}).get("conditions", ())}
    for kind, (true, reason, message) in changes.items():
        value, before = "True" if true else "False", found.get(kind, {})
        since = before["lastTransitionTime"] if before.get("status") == value else instant
        found[kind] = {
            "type": kind,
            "status": value,
            "reason": reason,
            "message": message,
            "lastTransitionTime": since,
            "observedGeneration": child.metadata.generation,
        }
    return list(found.values())


def _waits(child: Child, queue: str) -> str:
    """Return why a Workload is not admitted."""
    prefix = f"Workload {child.metadata.name} waits in LocalQueue {queue} of Kueue"
    if child.body.get("spec", {}).get("active") is False:
        return f"{prefix}: it is deactivated; set its spec.active to true"
    checks = [
        f"{check.get('name')}: {check['message']}"
        for check in child.body.get("status", {}).get("admissionChecks", ())
        if check.get("state") != "Ready" and check.get("message")
    ]
    finished, reserved = _true(child, "Finished"), _condition(child, "QuotaReserved")
    cause = str((finished or reserved or {}).get("message", "")) if not checks else "; ".join(checks)
    return f"{prefix}: {cause}" if cause else prefix


def _assigned(child: Child | None) -> dict[str, list[str]]:
    """Return role → names of its ResourceFlavors, in the order of the resources' names, each once."""
    if child is None or _true(child, "Admitted") is None:
        return {}
    admission = child.body.get("status", {}).get("admission") or {}
    return {
        str(each.get("name")): list(dict.fromkeys(str(name) for _, name in sorted((each.get("flavors") or {}).items())))
        for each in admission.get("podSetAssignments", ())
    }


def _condition(child: Child, kind: str) -> dict[str, Any] | None:
    found = child.body.get("status", {}).get("conditions", ())
    return next((each for each in found if each.get("type") == kind), None)


def _true(child: Child, kind: str) -> dict[str, Any] | None:
    found = _condition(child, kind)
    return found if found is not None and found.get("status") == "True" else None


def _ref(observed: Observed) -> Ref:
    return KUEUE_WORKLOADS.key, gang_name(observed.metadata.name)
