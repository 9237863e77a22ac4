"""Stop strings in the text of an answer. Engines look for them token by token, the runner cuts the text there."""

from __future__ import annotations

from collections.abc import Sequence


def find_stop(text: str, seen: int, stops: Sequence[str]) -> tuple[int, int] | None:
    """Return start and end of the stop string that ends first in ``text``; None: no stop string is new.

    Args:
        text: of the answer, or its last part.
        seen: number of its characters in which nothing is found any more: a stop string must end after them.
        stops: of equal ends the first one counts.
    """
    found = [(text.find(stop, max(0, seen - len(stop) + 1)), stop) for stop in stops]
    places = [(start, start + len(stop)) for start, stop in found if start >= 0]
    return min(places, default=None, key=lambda place: place[1])
