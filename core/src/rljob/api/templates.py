"""Prompt templates: {column} is replaced by the value of a column, {{ and }} are braces."""

from __future__ import annotations

import functools
import string
from collections.abc import Mapping
from typing import Any

_KINDS = {type(None): "null", list: "a list", dict: "a mapping"}


def columns_of(template: str) -> set[str]:
    """Return the columns that a template names.

    Raises:
        ValueError: the text is not a template; the message is the cause.
    """
    names = set()
    try:
        fields = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"is not a template ({error}); write {{{{ and }}}} for literal braces") from None
    for _, name, spec, conversion in fields:
        if name is None:
            continue
        if not name or spec or conversion or any(mark in name for mark in ".[]"):
            raise ValueError(f"{{{name}}} is not a column name; write {{{{ and }}}} for literal braces")
        names.add(name)
    return names


def fill(template: str, row: Mapping[str, Any]) -> str:
    """Return ``template`` with its columns replaced by the values of ``row``.

    Raises:
        ValueError: the row lacks a column, or a column contains neither text nor a number. The message names it.
    """
    parts = []
    for text, name in _parsed(template):
        parts.append(text)
        if name is not None:
            parts.append(text_of(row, name))
    return "".join(parts)


def text_of(row: Mapping[str, Any], column: str) -> str:
    """Return the value of a column as text. Numbers and booleans are formatted by Python's ``str``.

    Raises:
        ValueError: the row lacks the column, or the column contains neither text nor a number.
    """
    value = value_of(row, column)
    if not isinstance(value, str | int | float):
        raise ValueError(f"column {column!r} holds {kind_of(value)}; it must hold text or a number")
    return str(value)


def value_of(row: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column.

    Raises:
        ValueError: the row lacks the column.
    """
    if column not in row:
        if not row:
            raise ValueError(f"there is no column {column!r}; the row has no columns")
        known = ", ".join(row)
        raise ValueError(
            f"there is no column {column!r}; there are {known}; name one of them, or rename one with columns"
        )
    return row[column]


def kind_of(value: Any) -> str:
    """Return the type of a value that is neither text nor a number, for a message."""
    return _KINDS.get(type(value), f"a {type(value).__name__}")


@functools.lru_cache(maxsize=256)
def _parsed(template: str) -> tuple[tuple[str, str | None], ...]:
    return tuple((text, name) for text, name, _, _ in string.Formatter().parse(template))
