"""The arguments with which a loop asks for an answer. They are checked before anything is sent: a message that the
coordinator cannot read ends the runner, with all its samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rljob.api.text_escape import short_line
from rljob.runner.context import TrajectoryError

MOST_STOP_STRINGS = 16
MOST_STOP_CHARACTERS = 128
MOST_SHOWN = 100
"""Characters of a wrong value in an error."""


def checked_max_tokens(asks: str, value: Any) -> int:
    """Return ``max_tokens`` of a call, a plain int. ``asks``: the beginning of the sentence about a wrong value.

    Raises:
        TrajectoryError: it is not a whole number of at least 1.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise TrajectoryError(f"{asks} with max_tokens {_shown(value)}; give a whole number of at least 1")
    return int.__int__(value)


def checked_stop(asks: str, value: Any) -> list[str]:
    """Return ``stop`` of a call, a list of plain texts. ``asks``: as above.

    Raises:
        TrajectoryError: it is a text, or not a sequence of at most MOST_STOP_STRINGS texts of 1 to MOST_STOP_CHARACTERS
            characters.
    """
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):  # a text is a sequence of its characters
        raise TrajectoryError(f"{asks} with stop {_shown(value)}; give a list of texts")
    if len(value) > MOST_STOP_STRINGS:
        raise TrajectoryError(f"{asks} with {len(value)} strings in stop; give at most {MOST_STOP_STRINGS}")
    for text in value:
        if not (isinstance(text, str) and 1 <= len(text) <= MOST_STOP_CHARACTERS and _has_encoding(text)):
            raise TrajectoryError(
                f"{asks} with {_shown(text)} in stop; give texts of 1 to {MOST_STOP_CHARACTERS} characters"
            )
    return [str.__str__(text) for text in value]


def _has_encoding(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair
        return False
    return True


def _shown(value: Any) -> str:
    return short_line(repr(value), MOST_SHOWN)
