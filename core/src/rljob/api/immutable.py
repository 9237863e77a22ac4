"""Mutability of fields: the transition rules of the CRD, and the check that a manifest belongs to a run.

A field that may not change after creation has a CEL transition rule on the API server. A run, on one machine or in a
cluster, belongs to a manifest with the same values of all fields that define the run. Fewer fields define the run than
are immutable: a claim of another size stores the same run, but the operator creates a job's claim only once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rljob.api.cel_rule import CelRule, escaped
from rljob.api.diff import differences, format_value
from rljob.api.field_metadata import Fields, field_at, manifest_fields
from rljob.api.models import RLJob
from rljob.api.structural import Schema

CHANGED = "field is immutable; create a new RLJob"
LISTED = "entries cannot be added, removed or renamed after creation; create a new RLJob"
LOWERED = "can only be raised after creation; create a new RLJob"


def immutability(spec: Schema) -> Iterator[CelRule]:
    """Yield the transition rules. ``spec`` is the structural schema of an RLJob's spec."""
    fields = manifest_fields(RLJob)
    yield from _below(spec, "spec", fields)
    for path, field in fields.items():
        if field.mutable == "raise":
            parent, _, name = path.rpartition(".")
            yield CelRule(parent, f"self.{name} >= oldSelf.{name}", LOWERED, f".{name}")


def run_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield the differences that prevent the run of manifest ``old`` from continuing with manifest ``new``.

    Yields:
        Path, old value, new value, and the cause: the predicate of a sentence whose subject is the run.
    """
    fields = manifest_fields(RLJob)
    for path, was, now in differences(old, new):
        field = field_at(fields, path)
        if field.mutable == "raise":
            if now < was:
                yield path, was, now, f"started with {was}, which can only be raised; {now} is lower"
        elif field.defines_run:
            yield path, was, now, f"started with {format_value(was)}, not {format_value(now)}"


def _below(schema: Schema, path: str, fields: Fields) -> Iterator[CelRule]:
    for name, inner in schema["properties"].items():
        here = f"{path}.{name}"
        if path.endswith("[]") and name == "name":  # names are compared for the whole list
            continue
        always = "default" in inner or name in schema.get("required", [])
        match fields[here].mutable:
            case "never":
                yield CelRule(path, _same(name, always), CHANGED, f".{name}")
            case "partly" if inner["type"] == "array":
                yield CelRule(path, _same_names(name), LISTED, f".{name}")
                yield from _below(inner["items"], f"{here}[]", fields)
            case "partly":
                if not always:
                    yield CelRule(path, f"has(self.{name}) == has(oldSelf.{name})", CHANGED, f".{name}")
                yield from _below(inner, here, fields)


def _same(name: str, always: bool) -> str:
    new, old = f"self.{escaped(name)}", f"oldSelf.{escaped(name)}"
    return f"{new} == {old}" if always else f"has({new}) == has({old}) && (!has({new}) || {new} == {old})"


def _same_names(name: str) -> str:
    kept = f"self.{name}.all(entry, oldSelf.{name}.exists(old, old.name == entry.name))"
    return f"self.{name}.size() == oldSelf.{name}.size() && {kept}"
