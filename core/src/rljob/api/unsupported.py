"""Refuses values of the manifest that are not supported yet. They are never ignored; each message names the value.

The metadata of a field (:mod:`rljob.api.field_metadata`) lists its unsupported values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from rljob.api.diff import non_defaults
from rljob.api.field_metadata import manifest_fields, outermost

if TYPE_CHECKING:
    from rljob.api.models import RLJobSpec


def unsupported(spec: RLJobSpec) -> Iterator[str]:
    """Yield one ``field: sentence`` for each field with an unsupported value."""
    for field in outermost(manifest_fields(type(spec)), lambda field: field.unsupported):
        for found in non_defaults(spec, field.path):
            if field.unsupported is True or found.value in field.unsupported:
                yield f"{found.path}: {sentence(found.value, found.default)}"


def near_miss(location: Sequence[str | int], value: Any, known: str, default: Any, root: type[BaseModel]) -> str | None:
    """Return the message for an unsupported value in the wrong case (colocated for Colocated), or None.

    Args:
        location: location of the field below ``root``, as in pydantic's errors.
        value: invalid value of the field.
        known: valid values of the field, each in single quotes.
        default: default of the field.
        root: the model that was validated.
    """
    path = "".join("[]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")
    field = manifest_fields(root).get(path)
    if field is None or not field.unsupported:
        return None
    if not isinstance(value, str) or f"'{value.casefold()}'" not in known.casefold():
        return None
    if value.casefold() == str(default).casefold():
        return None
    if field.unsupported is not True and value.casefold() not in field.unsupported:
        return None
    return sentence(value, default)


def sentence(value: Any, default: Any) -> str:
    """Return the message for the unsupported ``value`` of a field with ``default``."""
    subject = f"{on_one_line(str(value))} is " if isinstance(value, str | int) else ""
    instead = f" or set {default}" if default is not None and subject else ""
    return f"{subject}not supported yet; remove it{instead}"


def on_one_line(text: str) -> str:
    """Return ``text`` with control characters escaped, for a message."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
