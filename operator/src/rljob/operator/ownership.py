"""Ownership of objects, and of their fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rljob.manifests.names import JOB
from rljob.operator.api_types import Meta
from rljob.operator.object_kinds import CLAIM, FIELD_MANAGER


def is_ours(job: Meta, kind: str, meta: Meta) -> bool:
    """Return whether an object belongs to the job: the job is its controller, or it is a claim, which outlives jobs."""
    for owner in meta.owner_references:
        if owner.controller:
            return owner.uid == job.uid
    return kind == CLAIM and meta.labels.get(JOB) == job.name


def foreign_sentence(job: Meta, kind: str, meta: Meta) -> str:
    """Return the message about a foreign object whose name the job needs."""
    controller = next((owner for owner in meta.owner_references if owner.controller), None)
    whose = f"{controller.kind} {controller.name}" if controller else "another owner"
    if controller is not None and (controller.kind, controller.name) == ("RLJob", job.name):
        whose = "an earlier RLJob of this name"
    if meta.deletion_timestamp:
        return f"{kind} {meta.name} of {whose} is still being deleted"
    return f"{kind} {meta.name} belongs to {whose}; delete it, or give the job another name"


def applied_fields(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Return managedFields in which fields set by POST or patch count as applied; None if they do already.

    Otherwise an apply could never remove such a field: the entry of the operation Update would still own it. Source:
    client-go's csaupgrade.
    """
    updates = [entry for entry in entries if _is_our(entry, "Update")]
    if not updates:
        return None
    mine = [entry for entry in entries if _is_our(entry, "Apply")] + updates
    fields: dict[str, Any] = {}
    for entry in mine:
        _merge(fields, entry.get("fieldsV1", {}))
    others = [dict(entry) for entry in entries if entry not in mine]
    return [*others, {**mine[0], "operation": "Apply", "fieldsV1": fields}]


def _is_our(entry: Mapping[str, Any], operation: str) -> bool:
    return (
        entry.get("manager") == FIELD_MANAGER and entry.get("operation") == operation and not entry.get("subresource")
    )


def _merge(into: dict[str, Any], fields: Mapping[str, Any]) -> None:
    for key, value in fields.items():
        _merge(into.setdefault(key, {}), value)
