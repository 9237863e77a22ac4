"""Hashes of a job's inputs, by which the operator decides which objects to create again.

A role's hash covers the manifest fields that its pods depend on, as the user wrote them (without defaults, presets not
expanded). So neither a new operator nor another image or cluster setting changes it, and running jobs are not
restarted by them. The rendered hash covers one object as it was rendered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from rljob.api.models import RLJob
from rljob.api.roles import OF_PODS, Rollout, Trainer

_JSON = msgspec.json.Encoder(order="deterministic")
_BYTES = 8

OPERATOR_ONLY = (
    "suspend",
    "suspendGraceSeconds",
    "failurePolicy",
    "activeDeadlineSeconds",
    "ttlSecondsAfterFinished",
    "keepCoordinatorSeconds",
    "managedBy",
    "network",
)
"""Fields of the spec that no pod depends on: changing them restarts no pod."""
COORDINATOR_ONLY = ("checkpoints", "tracking")
"""Fields of the spec, besides training.steps, that may change during a job and that only the coordinator reads."""
PLACED = ("rollouts", "rewards")


def digest(*values: Any) -> str:
    """Return a hash of JSON values, independent of the order of keys."""
    whole = hashlib.blake2b(digest_size=_BYTES)
    for value in values:
        whole.update(_JSON.encode(value))
        whole.update(b"\n")
    return whole.hexdigest()


def rendered_hash(rendered: Mapping[str, Any]) -> str:
    """Return the hash of an object without replicas and before it is annotated."""
    spec = rendered.get("spec")
    if isinstance(spec, dict) and "replicas" in spec:
        rendered = {**rendered, "spec": {key: value for key, value in spec.items() if key != "replicas"}}
    return digest(rendered)


class Inputs:
    """The fields of a job that its roles depend on."""

    def __init__(self, job: RLJob) -> None:
        self.written: dict[str, Any] = job.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        """The spec as the user wrote it."""
        self.parts = _of_parts(self.written)
        """The content of job.json: without templates, replicas and fields that only the operator reads."""
        self._coordinator = digest(self.parts)
        lasting = _without(self.parts, COORDINATOR_ONLY)
        lasting["training"] = _without(lasting["training"], ("steps",))
        self.lasting = digest(lasting)
        """Hash of the immutable fields."""

    def role(self, kind: str, name: str, *own: Any) -> str:
        """Return the hash of a role; ``own`` are the role's own fields, such as its template."""
        return digest(kind, name, self._coordinator if kind == "coordinator" else self.lasting, *own)


def of_pods(entry: Trainer | Rollout) -> Any:
    """Return what the pods of a trainer or pool depend on besides job.json, for :meth:`Inputs.role`.

    Hash only the template if no other placement field is set, so that hashes of existing jobs stay stable.
    """
    written = entry.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    placed = {field: written[field] for field in OF_PODS if field in written}
    return {"template": entry.template, **placed} if placed else entry.template


def spec_hash(job: RLJob) -> str:
    """Return the hash of the immutable fields (annotation rljob.dev/spec-hash of a claim)."""
    return Inputs(job).lasting


def _of_parts(written: Mapping[str, Any]) -> dict[str, Any]:
    parts = _without(written, (*OPERATOR_ONLY, "storage", "trainer", "runner", "coordinator", *PLACED))
    scheduling = _without(written.get("scheduling", {}), ("gang", "priorityClassName", "topology"))
    parts.pop("scheduling", None)
    if scheduling:
        parts["scheduling"] = scheduling
    if trainer := _without(written.get("trainer", {}), ("template", *OF_PODS)):
        parts["trainer"] = trainer
    if "initializer" in parts:
        parts["initializer"] = _without(parts["initializer"], ("template",))
    for field in PLACED:
        parts[field] = [_without(entry, ("template", "replicas", *OF_PODS)) for entry in written[field]]
    for reward in parts["rewards"]:
        if not reward.keys() & {"builtin", "function", "url", "local"}:
            reward["template"] = {}  # the user's container scores
    return parts


def _without(fields: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    left_out = frozenset(names)
    return {name: value for name, value in fields.items() if name not in left_out}
