"""Hashes of a job's inputs, by which the operator decides which objects to create again.

A role's hash covers the manifest fields that its pods depend on, as the user wrote them (without defaults, presets not
expanded). Which fields these are follows from the readers in their metadata (:mod:`rljob.api.field_metadata`). Neither
a new operator nor another image or cluster setting changes a role's hash, so they restart no running job. The rendered
hash covers one object as it was rendered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from rljob.api.field_metadata import Reader, manifest_fields, select
from rljob.api.models import RLJob, RLJobSpec
from rljob.api.roles import Rollout, Trainer

_JSON = msgspec.json.Encoder(order="deterministic")
_BYTES = 8


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
        self.parts = _read_by(self.written, "components", "coordinator")
        """The content of job.json: the fields that a process of the job reads."""
        self._coordinator = digest(self.parts)
        self.lasting = digest(_read_by(self.written, "components"))
        """Hash of the fields that define the run."""

    def role(self, kind: str, name: str, *own: Any) -> str:
        """Return the hash of a role; ``own`` are the role's own fields, such as its template."""
        return digest(kind, name, self._coordinator if kind == "coordinator" else self.lasting, *own)


def of_pods(entry: Trainer | Rollout) -> dict[str, Any]:
    """Return what the pods of a trainer or pool depend on besides job.json, for :meth:`Inputs.role`."""
    written = entry.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return select(written, manifest_fields(type(entry)), ["pods"])


def spec_hash(job: RLJob) -> str:
    """Return the hash of the fields that define the run (annotation rljob.dev/spec-hash of a claim)."""
    return Inputs(job).lasting


def _read_by(written: Mapping[str, Any], *readers: Reader) -> dict[str, Any]:
    """Return the fields of a spec that processes of ``readers`` read."""
    parts = select(written, manifest_fields(RLJobSpec), readers)
    for service in (*parts.get("rewards", ()), *parts.get("environments", ())):
        if not service.keys() & {"builtin", "function", "url", "local"}:
            service["template"] = {}  # the user's container serves
    return parts
