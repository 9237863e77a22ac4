"""Compares manifests: with each other, and with their defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

LONGEST_VALUE = 80
"""Maximum length of a value in a message, in characters."""


def differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield path, old and new value of the innermost differences.

    Named entries of a list are compared by name, in any order, as on the API server.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        if (named := _by_name(new)) and named.keys() == _by_name(old).keys():
            new = [named[entry["name"]] for entry in old]
        for i, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from differences(one, other, f"{path}[{i}]")
    elif old != new:
        yield path, old, new


def format_value(value: Any) -> str:
    """Return a value for a message: JSON, cut after ``LONGEST_VALUE`` characters."""
    return shortened(json.dumps(value, ensure_ascii=False))


def shortened(text: str) -> str:
    """Return ``text``, cut after ``LONGEST_VALUE`` characters."""
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"


def _by_name(entries: list[Any]) -> dict[str, Any]:
    """Return the entries by name; empty if not all entries have unique names."""
    if not all(isinstance(entry, dict) and "name" in entry for entry in entries):
        return {}
    named = {entry["name"]: entry for entry in entries}
    return named if len(named) == len(entries) else {}


@dataclass(frozen=True)
class NonDefault:
    """A field whose value differs from its default; ``path`` has indices: rollouts[0].hosts."""

    path: str
    value: Any
    default: Any


def non_defaults(model: BaseModel, pattern: str) -> Iterator[NonDefault]:
    """Yield the fields of ``model`` that match ``pattern`` (``rollouts[].hosts``) and differ from their default."""
    head, _, rest = pattern.partition(".")
    alias = head.removesuffix("[]")
    name, field = next((name, field) for name, field in type(model).model_fields.items() if field.alias == alias)
    value = getattr(model, name)
    if not rest:
        default = field.get_default(call_default_factory=True)
        if value != default:
            yield NonDefault(alias, value, default)
        return
    entries = {f"{alias}[{i}]": entry for i, entry in enumerate(value)} if head.endswith("[]") else {alias: value}
    for path, entry in entries.items():
        if entry is not None:
            for found in non_defaults(entry, rest):
                yield NonDefault(f"{path}.{found.path}", found.value, found.default)
