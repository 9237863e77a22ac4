"""The text of an exception of a user's code. Its methods are code of the user, too."""

from __future__ import annotations


def text_of(error: BaseException) -> str:
    """Return the text of an exception; empty if it has none."""
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 a user's exception may not have a text
        return ""


def described_error(error: BaseException) -> str:
    """Return type and text of an exception."""
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
