"""Mutable fields of a job. All other fields define the job: the API server refuses changes of them by CEL transition
rules, which are generated here for every field outside :data:`MUTABLE`."""

from __future__ import annotations

from collections.abc import Iterator

from rljob.api.cel_rules import Rule
from rljob.api.structural import Schema

MUTABLE = (
    "spec.initializer.template",
    "spec.training.steps",
    "spec.rewards[].replicas",
    "spec.rewards[].template",
    "spec.environments[].replicas",
    "spec.environments[].template",
    "spec.trainer.sharedMemory",
    "spec.trainer.rdma",
    "spec.trainer.nccl",
    "spec.trainer.hostNetwork",
    "spec.trainer.template",
    "spec.rollouts[].replicas",
    "spec.rollouts[].sharedMemory",
    "spec.rollouts[].rdma",
    "spec.rollouts[].nccl",
    "spec.rollouts[].hostNetwork",
    "spec.rollouts[].template",
    "spec.runner.replicas",
    "spec.runner.template",
    "spec.coordinator.template",
    "spec.checkpoints",
    "spec.tracking",
    "spec.network",
    "spec.suspend",
    "spec.suspendGraceSeconds",
    "spec.failurePolicy",
    "spec.activeDeadlineSeconds",
    "spec.ttlSecondsAfterFinished",
    "spec.keepCoordinatorSeconds",
)
"""Fields that may change: how the job runs, not what it computes."""

CHANGED = "field is immutable; create a new RLJob"
LISTED = "entries cannot be added, removed or renamed after creation; create a new RLJob"
LOWERED = "can only be raised after creation; create a new RLJob"


def immutability(spec: Schema) -> Iterator[Rule]:
    """Yield the transition rules. ``spec`` is the structural schema of an RLJob's spec."""
    yield from _below(spec, "spec")
    yield Rule("spec.training", "self.steps >= oldSelf.steps", LOWERED, ".steps")


def _below(schema: Schema, path: str) -> Iterator[Rule]:
    for name, field in schema["properties"].items():
        here = f"{path}.{name}"
        if here in MUTABLE or (path.endswith("[]") and name == "name"):  # names are compared for the whole list
            continue
        always = "default" in field or name in schema.get("required", [])
        if any(mutable.startswith(f"{here}.") for mutable in MUTABLE):
            if not always:
                yield Rule(path, f"has(self.{name}) == has(oldSelf.{name})", CHANGED, f".{name}")
            yield from _below(field, here)
        elif any(mutable.startswith(f"{here}[]") for mutable in MUTABLE):
            yield Rule(path, _same_names(name), LISTED, f".{name}")
            yield from _below(field["items"], f"{here}[]")
        else:
            yield Rule(path, _same(name, always), CHANGED, f".{name}")


def _same(name: str, always: bool) -> str:
    same = f"self.{name} == oldSelf.{name}"
    return same if always else f"has(self.{name}) == has(oldSelf.{name}) && (!has(self.{name}) || {same})"


def _same_names(name: str) -> str:
    kept = f"self.{name}.all(entry, oldSelf.{name}.exists(old, old.name == entry.name))"
    return f"self.{name}.size() == oldSelf.{name}.size() && {kept}"
