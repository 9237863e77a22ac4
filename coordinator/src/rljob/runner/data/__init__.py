"""Sources of the problems of tasks: rows by number, identical on every runner and at every start."""

from __future__ import annotations

from typing import Any, Protocol

SPLITS = ("train", "heldOut")


class Source(Protocol):
    """The problems of one task. At most one thread uses a source at a time."""

    def problem(self, split: str, row: int) -> dict[str, Any]:
        """Return row ``row`` (0 or more, without an upper limit) of ``split`` (train | heldOut) in plain JSON types.

        Raises:
            ValueError: the row cannot be read or generated; the message names the cause.
        """

    def size(self, split: str) -> int | None:
        """Return the number of rows of a split, after which the rows repeat; None for an endless split."""
