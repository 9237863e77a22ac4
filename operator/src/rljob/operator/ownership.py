"""Ownership of objects, and of their fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rljob.manifests.names import JOB
from rljob.operator.api_types import Meta
from rljob.operator.object_kinds import AUTOSCALER, CLAIM, FIELD_MANAGER


def is_ours(job: Meta, kind: str, meta: Meta) -> bool:
    """Return whether an object belongs to the job: the job is its controller, or it is a claim without a controller
    that has the job's label."""
    for reference in meta.owner_references:
        if reference.controller:
            return reference.uid == job.uid
    return kind == CLAIM and meta.labels.get(JOB) == job.name


def foreign_sentence(job: Meta, kind: str, meta: Meta) -> str:
    """Return the message about a foreign object whose name the job needs."""
    controller = next((reference for reference in meta.owner_references if reference.controller), None)
    owner = f"{controller.kind} {controller.name}" if controller else "another owner"
    if controller is not None and (controller.kind, controller.name) == ("RLJob", job.name):
        owner = "an earlier RLJob of this name"
    if meta.deletion_timestamp:
        return f"{kind} {meta.name} of {owner} is still being deleted"
    return f"{kind} {meta.name} belongs to {owner}; delete it, or give the job another name"


def applied_fields(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Return managedFields in which fields set by POST or patch count as applied; None if nothing has to change.

    Otherwise an apply could never remove such a field: the entry of the operation Update would still own it. Source:
    client-go's csaupgrade.
    """
    updates = [entry for entry in entries if _is_own_entry(entry, "Update")]
    if not updates:
        return None
    own = [entry for entry in entries if _is_own_entry(entry, "Apply")] + updates
    fields: dict[str, Any] = {}
    for entry in own:
        _merge(fields, entry.get("fieldsV1", {}))
    others = [dict(entry) for entry in entries if entry not in own]
    return [*others, {**own[0], "operation": "Apply", "fieldsV1": fields}]


def foreign_scaler(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return the field manager, other than the operator and its autoscaler, that owns spec.replicas; empty: none."""
    for entry in entries:
        owns = "f:replicas" in entry.get("fieldsV1", {}).get("f:spec", {})
        if owns and entry.get("manager") not in (FIELD_MANAGER, AUTOSCALER):
            return str(entry.get("manager") or "something else")
    return ""


def _is_own_entry(entry: Mapping[str, Any], operation: str) -> bool:
    return (
        entry.get("manager") == FIELD_MANAGER and entry.get("operation") == operation and not entry.get("subresource")
    )


def _merge(into: dict[str, Any], fields: Mapping[str, Any]) -> None:
    for key, value in fields.items():
        _merge(into.setdefault(key, {}), value)
