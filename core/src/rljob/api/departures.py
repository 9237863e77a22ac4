"""Where a manifest departs from its defaults, by path."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel


@dataclass(frozen=True)
class Departure:
    """A field that is set to something other than its default; ``path`` as a person writes it: rollouts[0].hosts."""

    path: str
    value: Any
    default: Any


def departures(model: BaseModel, pattern: str) -> Iterator[Departure]:
    """Yield the fields of ``model`` that match ``pattern`` (``rollouts[*].hosts``) and are not at their default."""
    head, _, rest = pattern.partition(".")
    alias = head.removesuffix("[*]")
    name, field = next((name, field) for name, field in type(model).model_fields.items() if field.alias == alias)
    value = getattr(model, name)
    if not rest:
        default = field.get_default(call_default_factory=True)
        if value != default:
            yield Departure(alias, value, default)
        return
    entries = {f"{alias}[{i}]": entry for i, entry in enumerate(value)} if head.endswith("[*]") else {alias: value}
    for path, entry in entries.items():
        if entry is not None:
            for found in departures(entry, rest):
                yield Departure(f"{path}.{found.path}", found.value, found.default)
