"""One built-in implementation that a manifest field names, and what registries of them say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Builtin:
    """A built-in implementation.

    Args:
        reference: its module:attribute.
        summary: of the description of the manifest field, without a full stop; empty: the description has none.
    """

    reference: str
    summary: str = ""


def references(registry: Mapping[str, Builtin]) -> dict[str, str]:
    """Return name → module:attribute."""
    return {name: builtin.reference for name, builtin in registry.items()}


def summaries(registry: Mapping[str, Builtin]) -> str:
    """Return one sentence for each implementation that has a summary."""
    return " ".join(f"`{name}`: {builtin.summary}." for name, builtin in registry.items() if builtin.summary)
