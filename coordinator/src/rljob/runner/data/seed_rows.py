"""Rows with only a seed, for environments that generate their problems: the same row on every runner."""

from __future__ import annotations

import struct
from typing import Any

import blake3

from rljob.api.tasks import Seeds


class SeedRows:
    """Seeds of one task. Row r of a split is a pure function of (job seed, split, r).

    The last bit of a seed is its split, so no held-out seed is a seed of training. Seeds are below 2**53, so that JSON
    keeps them exactly.

    Args:
        data: the manifest's entry.
        seed: the job's.
    """

    def __init__(self, data: Seeds, seed: int) -> None:
        self._data = data
        self._seed = seed

    def problem(self, split: str, row: int) -> dict[str, Any]:
        """Return row ``row`` of ``split`` (train | heldOut)."""
        if split == "train" and self._data.train is not None:
            row %= self._data.train
        key = struct.pack("<QQ", self._seed, row) + split.encode()
        drawn = int.from_bytes(blake3.blake3(key).digest(8), "little") >> 12
        return {"seed": 2 * drawn + (split == "heldOut")}

    def size(self, split: str) -> int | None:
        """See :meth:`rljob.runner.data.Source.size`: held-out rows are endless."""
        return self._data.train if split == "train" else None
