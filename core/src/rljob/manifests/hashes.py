"""Hashes of a job's inputs, by which the operator knows what has to be made anew.

A role's hash is over the manifest's fields that its pods depend on, as the user wrote them (defaults left out, presets
not expanded): so neither a newer operator nor another image or setting of the cluster changes it, and a job that runs
is left alone by both. The rendered hash is over one object as it was rendered.
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
"""Fields of the spec that no pod depends on: a change of them restarts none."""
COORDINATOR_ONLY = ("checkpoints", "tracking")
"""Fields of the spec, besides training.steps, that may change in a job's life and that the coordinator alone reads."""
PLACED = ("rollouts", "rewards")


def digest(*values: Any) -> str:
    """Return a hash of JSON values, in which the order of keys does not matter."""
    whole = hashlib.blake2b(digest_size=_BYTES)
    for value in values:
        whole.update(_JSON.encode(value))
        whole.update(b"\n")
    return whole.hexdigest()


def rendered_hash(rendered: Mapping[str, Any]) -> str:
    """Return the hash of an object before it is annotated, its replicas left out."""
    spec = rendered.get("spec")
    if isinstance(spec, dict) and "replicas" in spec:
        rendered = {**rendered, "spec": {key: value for key, value in spec.items() if key != "replicas"}}
    return digest(rendered)


class Inputs:
    """A job's fields as its roles depend on them."""

    def __init__(self, job: RLJob) -> None:
        self.written: dict[str, Any] = job.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        """The spec as the user wrote it."""
        self.parts = _of_parts(self.written)
        """What the parts are told (job.json): no templates, no replicas, nothing that only the operator reads."""
        self._coordinator = digest(self.parts)
        lasting = _without(self.parts, COORDINATOR_ONLY)
        lasting["training"] = _without(lasting["training"], ("steps",))
        self.lasting = digest(lasting)
        """Hash of what cannot change in a job's life."""

    def role(self, kind: str, name: str, *own: Any) -> str:
        """Return the hash of a role whose own fields, such as its template, are ``own``."""
        return digest(kind, name, self._coordinator if kind == "coordinator" else self.lasting, *own)


def of_pods(entry: Trainer | Rollout) -> Any:
    """Return what the pods of a trainer or pool depend on besides what parts are told: for :meth:`Inputs.role`.

    The template alone where nothing else is said: so it was before there was anything else, and running jobs stay.
    """
    written = entry.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    placed = {field: written[field] for field in OF_PODS if field in written}
    return {"template": entry.template, **placed} if placed else entry.template


def spec_hash(job: RLJob) -> str:
    """Return the hash of the fields that cannot change in a job's life (annotation rljob.dev/spec-hash of a claim)."""
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
        if not reward.keys() & {"builtin", "url", "local"}:
            reward["template"] = {}  # it says what scores: a container of the user's
    return parts


def _without(fields: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    left_out = frozenset(names)
    return {name: value for name, value in fields.items() if name not in left_out}
