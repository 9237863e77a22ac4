"""A plan in the making: the files of this package fill it, each its part."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rljob.api.status import RLJobStatus
from rljob.manifests.inputs import Object
from rljob.operator.plan import Event, Observed, Plan, Ref
from rljob.operator.planning.scene import deletion
from rljob.operator.planning.times import instant
from rljob.operator.seen import Child


@dataclass
class Draft:
    """A plan in the making. ``status`` is a copy: fields are set anew, never changed in place."""

    observed: Observed
    status: RLJobStatus
    needed: list[Ref] = field(default_factory=list)
    desired: list[Object] = field(default_factory=list)
    deletions: dict[Ref, str] = field(default_factory=dict)
    pod_costs: dict[str, int] = field(default_factory=dict)
    record_first: bool = False
    delete_job: bool = False
    events: list[Event] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)

    @property
    def now(self) -> float:
        """Unix seconds."""
        return self.observed.now

    @property
    def instant(self) -> str:
        """Now, as the status writes it."""
        return instant(self.observed.now)

    def delete(self, children: Iterable[Child]) -> None:
        """Have children deleted."""
        for child in children:
            ref, uid = deletion(child)
            self.deletions[ref] = uid

    def look_again(self, seconds: float) -> None:
        """Have the job looked at again then, unless the moment is over."""
        if seconds > 0:
            self.moments.append(seconds)

    def plan(self) -> Plan:
        """Return the plan."""
        return Plan(
            needed=self.needed,
            desired=self.desired,
            deletions=list(self.deletions.items()),
            pod_costs=self.pod_costs,
            status=self.status,
            record_first=self.record_first,
            delete_job=self.delete_job,
            events=self.events,
            after=min(self.moments, default=None),
        )
