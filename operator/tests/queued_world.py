"""A job in a queue of Kueue, whose answers tests give."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rljob.manifests.inputs import Flavor
from rljob.manifests.pods import GRACE_SECONDS
from rljob.operator.planning.timestamps import instant

from .world import World, put

WORKLOAD = "Workload.kueue.x-k8s.io", "sums-gang"
FIXED = [{"name": "main", "replicas": {"min": 2}}]
FLAVOR = Flavor({"pool": "h100"}, ({"key": "h100", "operator": "Exists"},))


class Queued(World):
    """A job in a queue of Kueue. ``flavors``: those that can be read; ``priority``: value of its PriorityClass."""

    def __init__(self, **spec: Any) -> None:
        gang = {"gang": {"provider": "kueue", "queue": "research"}}
        super().__init__(**{"scheduling": gang, "rollouts": FIXED, **spec})
        self.flavors = {"h100": FLAVOR}
        self.priority: int | None = None

    def observe(self, status: Any = None) -> Any:
        return replace(super().observe(status), flavors=self.flavors, priority=self.priority)

    @property
    def workload(self) -> dict[str, Any]:
        return self.children[WORKLOAD].body

    def say(self, admission: Any = None, **conditions: tuple[str, str, str]) -> None:
        """Have Kueue write the status of the Workload."""
        status = self.workload.setdefault("status", {})
        found = {each["type"]: each for each in status.get("conditions", ())}
        for kind, (value, reason, message) in conditions.items():
            found[kind] = {"type": kind, "status": value, "reason": reason, "message": message}
            found[kind]["lastTransitionTime"] = instant(self.now)
        status["conditions"] = list(found.values())
        if admission is not None:
            status["admission"] = admission

    def admit(self, flavor: str = "h100") -> None:
        roles = [each["name"] for each in self.workload["spec"]["podSets"]]
        flavors = {"nvidia.com/gpu": flavor, "cpu": flavor}
        assigned = [{"name": role, "flavors": flavors if "r" in role[:2] else {}} for role in roles]
        admitted = {"clusterQueue": "gpus", "podSetAssignments": assigned}
        yes = ("True", "Admitted", "admitted")
        self.say(admitted, QuotaReserved=yes, Admitted=yes, Evicted=("False", "QuotaReserved", ""))

    def evict(self, reason: str = "Preempted") -> None:
        self.say(Evicted=("True", reason, "another job has priority"))

    def lose(self, name: str) -> None:
        """Have pods terminate for ever, whatever becomes of their workloads: their node is lost."""
        for pod in self.find(name):
            put(pod.metadata, deletion_timestamp=instant(self.now + GRACE_SECONDS))
            del pod.metadata.labels["owner"]

    def do(self, made: Any) -> None:
        super().do(made)
        for ref, change in made.status_patches:
            status = self.children[ref].body.setdefault("status", {})
            status.update(change)
            self.children[ref].body["status"] = {key: value for key, value in status.items() if value is not None}

    def kueue_says(self, kind: str) -> tuple[str, str]:
        found = self.workload.get("status", {}).get("conditions", ())
        return next(((each["status"], each["reason"]) for each in found if each["type"] == kind), ("", ""))


def running_in_kueue() -> Queued:
    """Return a job that has been admitted and runs."""
    world = Queued()
    world.settle()
    world.admit()
    world.run_up()
    return world
