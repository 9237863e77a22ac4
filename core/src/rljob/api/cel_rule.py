"""A CEL rule of the API server, and the expressions that several rules have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CelRule:
    """A CEL validation rule.

    ``at``: path of the rule's schema, with [] for the entries of a list; ``self`` is the value at this path. ``field``:
    path of the invalid field below ``at`` (.steps). Messages contain no values: computing them in CEL would exceed the
    budget.
    """

    at: str
    rule: str
    message: str
    field: str = ""


RESERVED = {"function", "if", "import", "in", "let", "loop", "namespace", "package", "return", "break", "continue"}
"""Names that CEL reserves; Kubernetes escapes a field of such a name."""


def escaped(field: str) -> str:
    """Return the name of a field in a CEL rule."""
    return f"__{field}__" if field in RESERVED else field


def given(fields: tuple[str, ...]) -> str:
    """Return the list of whether each field is set."""
    return f"[{', '.join(f'has(self.{escaped(field)})' for field in fields)}]"


def at_most_one_of(*fields: str) -> str:
    """Return the condition that at most one of the fields is set."""
    return f"{given(fields)}.filter(given, given).size() <= 1"
