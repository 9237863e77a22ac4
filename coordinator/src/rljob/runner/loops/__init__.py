"""The built-in loops, one per module. `tasks[].loop` names a built-in loop or a user's async function."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from rljob.api.extensions import LOOPS, is_async, load
from rljob.protocol.score_messages import Score
from rljob.runner.context import Context

Loop: TypeAlias = Callable[[Context], Awaitable[Score]]
"""Drives one trajectory to its score."""


def load_loop(reference: str, field: str) -> Loop:
    """Return the loop that ``tasks[].loop`` names.

    Args:
        reference: name of a built-in loop, or module:attribute.
        field: path of the field, for errors.

    Raises:
        ValueError: the loop cannot be imported, or is not an async function of one argument.
    """
    loop: Any = load(LOOPS, reference, field)
    if isinstance(loop, type) or not callable(loop) or not is_async(loop):
        raise ValueError(
            f"{field}: {reference} is not an async function; define it as async def loop(context) -> Score"
        )
    try:
        inspect.signature(loop).bind(None)
    except TypeError:
        raise ValueError(
            f"{field}: {reference} does not take one argument; define it as async def loop(context)"
        ) from None
    found: Loop = loop
    return found
