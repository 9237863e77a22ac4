"""The plan under construction, which the other files of this package fill."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rljob.api.job_status import RLJobStatus
from rljob.manifests.inputs import Object
from rljob.operator.api_types import Child
from rljob.operator.plan import Event, Observed, Plan, Ref
from rljob.operator.planning.job_view import deletion
from rljob.operator.planning.timestamps import instant
from rljob.operator.scale_policy import SampledRole


@dataclass
class PlanBuilder:
    """Builds a plan. ``status`` is a shallow copy: fields are replaced, never changed in place."""

    observed: Observed
    status: RLJobStatus
    needed: list[Ref] = field(default_factory=list)
    desired: list[Object] = field(default_factory=list)
    deletions: dict[Ref, str] = field(default_factory=dict)
    pod_costs: dict[str, int] = field(default_factory=dict)
    status_patches: list[tuple[Ref, Object]] = field(default_factory=list)
    scales: dict[str, int] = field(default_factory=dict)
    sampled: dict[str, SampledRole] = field(default_factory=dict)
    record_first: bool = False
    delete_job: bool = False
    events: list[Event] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)

    @property
    def now(self) -> float:
        """Unix seconds."""
        return self.observed.now

    @property
    def instant(self) -> str:
        """``now`` in the format of the status."""
        return instant(self.observed.now)

    def delete(self, children: Iterable[Child]) -> None:
        """Add deletions of children."""
        for child in children:
            ref, uid = deletion(child)
            self.deletions[ref] = uid

    def requeue_after(self, seconds: float) -> None:
        """Reconcile the job again after ``seconds``; ignored if that is not positive."""
        if seconds > 0:
            self.delays.append(seconds)

    def plan(self) -> Plan:
        """Return the plan."""
        return Plan(
            needed=self.needed,
            desired=self.desired,
            deletions=list(self.deletions.items()),
            pod_costs=self.pod_costs,
            status_patches=self.status_patches,
            scales=self.scales,
            sampled=self.sampled,
            status=self.status,
            record_first=self.record_first,
            delete_job=self.delete_job,
            events=self.events,
            after=min(self.delays, default=None),
        )
