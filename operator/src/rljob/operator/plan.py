"""Input and output of planning: Observed → Plan, which :mod:`rljob.operator.executor` executes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rljob.api.job_status import RLJobStatus
from rljob.api.models import RLJob
from rljob.manifests.inputs import Flavor, Object
from rljob.manifests.names import RAY_CLUSTER
from rljob.operator.api_types import Child, Meta, Pod
from rljob.operator.scale_policy import LoadPoint, SampledRole

COORDINATOR, INITIALIZER, TRAINER = "coordinator", "initializer", "trainer"
"""Roles."""
POD_DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
"""Annotation of pods: a Deployment removes the pods with the lowest cost first."""

Key = tuple[str, str]
"""Namespace and name of an RLJob."""

Ref = tuple[str, str]
"""Key of the kind (:attr:`rljob.kube.resource_kinds.Resource.key`) and name of a child."""


@dataclass(frozen=True)
class Observed:
    """Input of a plan. All from caches, except ``now``."""

    metadata: Meta
    """Of the RLJob."""
    job: RLJob | None
    """The user's manifest, not resolved; None if it is not valid."""
    problems: Sequence[str]
    """Errors of the spec."""
    status: RLJobStatus
    """Last known status."""
    children: Mapping[Ref, Child]
    """The job's objects (by label), including those with a deletionTimestamp."""
    pods: Sequence[Pod]
    """The job's pods."""
    scales: Mapping[str, int]
    """Role → replicas of its RLJobScale."""
    foreign: Mapping[Ref, str]
    """Child whose name a foreign object has → message."""
    refused: Mapping[Ref, str]
    """Child that the API server refused (quota, admission, invalid) → its message."""
    now: float
    """Unix seconds."""
    warnings: Mapping[str, str] = field(default_factory=dict)
    """uid of a stalled pod or child → the message of its newest warning event. A claim named by spec.storage.claim has
    the key of :func:`rljob.operator.planning.pod_diagnosis.key_of_claim`."""
    scale_owners: Mapping[str, str] = field(default_factory=dict)
    """Role → what, other than the operator, owns the replicas of its RLJobScale; roles without such an owner may be
    missing."""
    loads: Mapping[str, Sequence[LoadPoint]] = field(default_factory=dict)
    """Role → its loads since the last change of its replicas, oldest first, of roles that the built-in autoscaler
    scales."""
    flavors: Mapping[str, Flavor] = field(default_factory=dict)
    """Name of a ResourceFlavor of Kueue that the job's Workload has been assigned → its nodes, if it can be read."""
    priority: int | None = None
    """Value of spec.scheduling.priorityClassName, if the job waits in a queue of Kueue and it can be read."""
    claim_in_use: str = ""
    """Message if another job uses the claim, so that no pod may be started; always empty for a job with pods."""

    @property
    def conflicts(self) -> Mapping[Ref, str]:
        """The foreign objects that keep the job from starting. A RayCluster takes another name instead."""
        return {ref: message for ref, message in self.foreign.items() if ref[0] != RAY_CLUSTER}


@dataclass(frozen=True)
class Event:
    """A Kubernetes event on the RLJob."""

    type: str
    """Normal or Warning."""
    reason: str
    message: str


@dataclass(frozen=True)
class Plan:
    """Writes in this order: status if ``record_first``, deletions, pod_costs, check of ``needed``, desired,
    status_patches, scales, status, events."""

    needed: Sequence[Ref] = ()
    """Objects of a job without pods that do not exist yet: the executor checks that no foreign object has their names
    before it creates any object, because some are created much later (engines after the initializer)."""
    desired: Sequence[Object] = ()
    """Objects that must exist: created if missing, applied if the hash of their role or their content has changed,
    replicas set. Objects that are neither here nor in ``deletions`` are left unchanged."""
    deletions: Sequence[tuple[Ref, str]] = ()
    """Child and its uid; background propagation. A pod is on a lost node, and is deleted without its kubelet."""
    pod_costs: Mapping[str, int] = field(default_factory=dict)
    """Pod name → controller.kubernetes.io/pod-deletion-cost, to be set before replicas are lowered."""
    status_patches: Sequence[tuple[Ref, Object]] = ()
    """Child and a merge patch of its status, which holds for the observed version of the child only."""
    scales: Mapping[str, int] = field(default_factory=dict)
    """Role → replicas that the built-in autoscaler writes to its RLJobScale, after all other writes of objects."""
    sampled: Mapping[str, SampledRole] = field(default_factory=dict)
    """Roles whose load is sampled, by name."""
    status: RLJobStatus | None = None
    """The status except ``run``; None: another controller manages the RLJob (managedBy)."""
    record_first: bool = False
    """The status holds a decision (attempt, suspension) that must be stored before the other writes."""
    delete_job: bool = False
    """spec.ttlSecondsAfterFinished has passed."""
    events: Sequence[Event] = ()
    """Recorded after the status is written."""
    after: float | None = None
    """Seconds until the next reconcile if nothing changes."""

    def status_fields(self, written: RLJobStatus) -> dict[str, Any]:
        """Return the status as JSON for server-side apply, without the coordinator's part.

        Args:
            written: the current status. Fields to remove are null: leaving a field out only gives up its ownership,
                and it stays while another manager owns it (a restored backup, `kubectl edit`).
        """
        assert self.status is not None
        return _without_absent(_fields(self.status), _fields(written))


def _fields(status: RLJobStatus) -> dict[str, Any]:
    return status.model_dump(mode="json", by_alias=True, exclude={"run"})


def _without_absent(planned: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``planned`` without fields that are None both there and in ``written``."""
    applied = {}
    for name, value in planned.items():
        before = written.get(name)
        if isinstance(value, dict):
            applied[name] = _without_absent(value, before or {})
        elif value is not None or before is not None:
            applied[name] = value
    return applied
