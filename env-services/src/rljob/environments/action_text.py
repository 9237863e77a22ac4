"""What environments read: the answer in a text of the model, and the seed of a row."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def answer_text(text: str) -> str:
    """Return what is between the first <answer> and its </answer>, if the text has them, else the whole text."""
    found = ANSWER.search(text)
    return (found[1] if found else text).strip()


def seed_of(row: Mapping[str, Any]) -> int:
    """Return the seed of a row, from which a game generates its problem.

    Raises:
        ValueError: the row has no whole number as seed.
    """
    seed = row.get("seed")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ValueError("the row has no column seed with a whole number; use the data source seeds")
    return seed
