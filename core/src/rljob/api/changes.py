"""How two manifests differ: what a run was started with, and what it is asked to go on as."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

LONGEST_VALUE = 80


def differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield path, old and new value of the innermost values that differ.

    Entries of a list that have names are the same by them, in whatever order: so the API server sees it too.
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


def shown(value: Any) -> str:
    """Return a value as a sentence shows it: JSON, cut when it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"


def _by_name(entries: list[Any]) -> dict[str, Any]:
    """Return the entries by their names; empty when they are not a list of named entries."""
    if not all(isinstance(entry, dict) and "name" in entry for entry in entries):
        return {}
    named = {entry["name"]: entry for entry in entries}
    return named if len(named) == len(entries) else {}
