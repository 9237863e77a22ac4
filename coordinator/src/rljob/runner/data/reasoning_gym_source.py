"""Problems of reasoning-gym datasets by row: the same row on every runner and at every start.

Row r of a split is a pure function of (dataset, its config, job seed, split, r). Attempt k = 0, 1, … hashes (seed,
split, r, k) to an index of the procedural dataset; the row is the first problem whose question belongs to the split.
Rows are endless. Some datasets iterate over sets of strings, so the process needs a fixed PYTHONHASHSEED, which main.py
sets.
"""

from __future__ import annotations

import contextlib
import difflib
import struct
import threading
from typing import Any

import blake3
import msgspec

from rljob.api.tasks import ReasoningGym
from rljob.protocol.data import is_held_out
from rljob.protocol.startup import lazy_imports

with lazy_imports("cellpylib"):  # cellpylib imports matplotlib, which takes as long as all of reasoning_gym
    from reasoning_gym.factory import DATASETS, create_dataset

MAX_ATTEMPTS = 1000
_INDICES = 2**31 - 1
_NUMPY_STATE = threading.Lock()
"""Held while a problem is made that uses NumPy's global random state (pool_matrix): each task has its own thread."""


class ReasoningGymSource:
    """Problems of one reasoning-gym dataset.

    Args:
        data: the task's dataset and its config.
        seed: the job's.
        where: path of ``data`` in the manifest, for error messages.

    Raises:
        ValueError: reasoning-gym has no such dataset, or the dataset rejects the config.
    """

    def __init__(self, data: ReasoningGym, seed: int, where: str) -> None:
        self._data = data
        self._seed = seed
        self._where = where
        if data.dataset not in DATASETS:
            close = difflib.get_close_matches(data.dataset, DATASETS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "; name one that reasoning-gym has"
            raise ValueError(f"{where}.dataset: there is no dataset {data.dataset!r} in reasoning-gym{hint}")
        try:
            self._dataset = create_dataset(data.dataset, seed=0, size=1, **data.config)
        except Exception as error:  # datasets check their config differently: assert, TypeError, ValueError
            raise ValueError(f"{where}.config: {data.dataset} refuses it: {error}; correct the parameter") from error

    def problem(self, split: str, row: int) -> dict[str, Any]:
        """Return row ``row`` of ``split`` (train | heldOut) in plain JSON types: question, answer, metadata.

        Raises:
            ValueError: none of MAX_ATTEMPTS questions belongs to the split.
        """
        for k in range(MAX_ATTEMPTS):
            problem = self._generate(_index(self._seed, split, row, k))
            if is_held_out(problem["question"]) == (split == "heldOut"):
                return problem
        raise ValueError(
            f"{self._where}: none of {MAX_ATTEMPTS} questions of {self._data.dataset} belongs to the split {split}; "
            "widen its config, it has too few different questions"
        )

    def size(self, split: str) -> int | None:
        """See :meth:`rljob.runner.data.Source.size`: rows are endless."""
        return None

    def _generate(self, index: int) -> dict[str, Any]:
        try:
            with _NUMPY_STATE if self._data.dataset == "pool_matrix" else contextlib.nullcontext():
                entry = self._dataset[index]
        except IndexError:  # a few datasets make all items at creation: the index becomes their seed
            entry = create_dataset(self._data.dataset, seed=index, size=1, **self._data.config)[0]
        problem: dict[str, Any] = msgspec.to_builtins(entry, str_keys=True, enc_hook=_plain)
        return problem


def _index(seed: int, split: str, row: int, k: int) -> int:
    key = struct.pack("<QQQ", seed, row, k) + split.encode()
    return int.from_bytes(blake3.blake3(key).digest(8), "little") % _INDICES


def _plain(value: Any) -> Any:
    """Return a NumPy scalar as a Python number, and any other type that JSON lacks as text."""
    return value.item() if hasattr(value, "item") else str(value)
