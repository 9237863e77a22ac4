"""Where the problems of tasks come from: rows by number, the same ones on every runner and at every start."""

from __future__ import annotations

from typing import Any, Protocol

SPLITS = ("train", "heldOut")


class Source(Protocol):
    """The problems of one task. Used by one thread at a time."""

    def problem(self, split: str, row: int) -> dict[str, Any]:
        """Return row ``row`` (from 0, without end) of ``split`` (train | heldOut) in plain JSON types.

        Raises:
            ValueError: there is no such row to be had; the sentence says why.
        """

    def size(self, split: str) -> int | None:
        """Return the number of rows of a split, after which it starts from its first row again; None: it has no end."""
