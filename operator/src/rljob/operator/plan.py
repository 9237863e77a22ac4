"""What a reconcile decides: :mod:`rljob.operator.planning` makes it, :mod:`rljob.operator.executor` does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rljob.api.models import RLJob
from rljob.api.status import RLJobStatus
from rljob.manifests.inputs import Object
from rljob.operator.seen import Child, Meta, Pod

Key = tuple[str, str]
"""Namespace and name of an RLJob."""
Ref = tuple[str, str]
"""Kind and name of a child."""


@dataclass(frozen=True)
class Observed:
    """All that one decision looks at. Of caches, but for ``now``."""

    metadata: Meta
    """Of the RLJob."""
    job: RLJob | None
    """As the user wrote it, not resolved; None if it is not valid."""
    problems: Sequence[str]
    """What is wrong with it: sentences."""
    status: RLJobStatus
    """As it was written last."""
    children: Mapping[Ref, Child]
    """The job's objects (by label), also those that are being deleted."""
    pods: Sequence[Pod]
    """The job's pods."""
    scales: Mapping[str, int]
    """Role → replicas that its RLJobScale asks for."""
    foreign: Mapping[Ref, str]
    """Children that cannot be made because an object that is not the job's has the name → a sentence."""
    refused: Mapping[Ref, str]
    """Children that the API server refused for good (quota, admission, invalid) → its message."""
    now: float
    """Unix seconds."""
    mishaps: Mapping[str, str] = field(default_factory=dict)
    """uid of a pod or child that is late → what keeps it, as its events say. The claim that the job was given is there
    by :func:`rljob.operator.planning.pending.key_of_claim`."""
    claim_in_use: str = ""
    """Why nothing of the job may be started, as another one uses its claim: a sentence. Never of a job with pods."""


@dataclass(frozen=True)
class Event:
    """A Kubernetes event on the RLJob."""

    type: str
    """Normal or Warning."""
    reason: str
    message: str


@dataclass(frozen=True)
class Plan:
    """What is to be done, in this order: status if ``record_first``, deletions, pod_costs, a look at what is needed,
    desired, status, events."""

    needed: Sequence[Ref] = ()
    """Objects that nothing was made of yet, of a job of which no pod was started yet: whether something foreign has
    their names is found out before anything is made, not when their turn comes (engines come after the initializer)."""
    desired: Sequence[Object] = ()
    """Objects that shall be: made where they are missing, applied again where their role's hash changed or somebody
    changed them, replicas set. What is not here is left alone unless it is in ``deletions``."""
    deletions: Sequence[tuple[Ref, str]] = ()
    """Child and its uid; background propagation."""
    pod_costs: Mapping[str, int] = field(default_factory=dict)
    """Pod name → controller.kubernetes.io/pod-deletion-cost, to be set before replicas are lowered."""
    status: RLJobStatus | None = None
    """All of the status but ``run``; None: the RLJob is none of ours (managedBy)."""
    record_first: bool = False
    """The status holds a decision (attempt, suspension) that must be durable before anything follows from it."""
    delete_job: bool = False
    """Its time to live is over."""
    events: Sequence[Event] = ()
    """Transitions, to be told once the status is written."""
    after: float | None = None
    """Seconds until it is to be looked at again, though nothing changes."""

    def status_fields(self, written: RLJobStatus) -> dict[str, Any]:
        """Return the status as JSON for server-side apply, without what is the coordinator's.

        Args:
            written: the status as it is. What it has and shall not have is null: to leave a field out only gives it
                up, and it stays for as long as another manager has it (a restored backup, `kubectl edit`).
        """
        assert self.status is not None
        return _said(_fields(self.status), _fields(written))


def _fields(status: RLJobStatus) -> dict[str, Any]:
    return status.model_dump(mode="json", by_alias=True, exclude={"run"})


def _said(planned: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is planned; of what is None only what was written."""
    said = {}
    for name, value in planned.items():
        before = written.get(name)
        if isinstance(value, dict):
            said[name] = _said(value, before or {})
        elif value is not None or before is not None:
            said[name] = value
    return said
