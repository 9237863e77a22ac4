"""Rows of files as problems: two splits, and a separate order for each pass over the training split.

All rows are read once at the start, so that an invalid row is reported before the run begins. Only the position of each
row stays in memory, eight bytes per row; the row itself is read on request.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rljob.api.templates import value_of
from rljob.protocol.data import is_held_out
from rljob.runner.data.shuffle import pass_key, shuffled

log = logging.getLogger(__name__)

Row = dict[str, Any]


class LocatedRow(NamedTuple):
    """A row and its location, as :meth:`TableRows.rows` yields it."""

    position: int
    """Argument of :meth:`TableRows.read`."""
    place: str
    """Location for messages, for example ``line 5``."""
    row: Row


class TableRows(Protocol):
    """The rows of one file or directory."""

    where: str
    """The field of the manifest that names it."""
    path: Path
    files: list[Path]
    """All files that the rows are read from."""

    def rows(self) -> Iterator[LocatedRow]:
        """Yield all rows in order.

        Raises:
            ValueError: the data cannot be read, or an entry is not a row.
        """

    def read(self, position: int) -> Row:
        """Return the row at a position that :meth:`rows` yielded."""


class TableSource:
    """Problems of one task from tables.

    Args:
        train: rows for training.
        held_out: rows for evaluation; None: a fraction of ``train`` is held out.
        fraction: that fraction, chosen by the hash of a row's prompt, so that equal prompts are in the same split.
        columns: column name in the task → column name in the data.
        identify: returns the text that identifies a row's prompt; raises ValueError if the row does not fit the task.
        order: (split, number of the pass) → key of the order of the pass; None: the order of the file.

    Raises:
        ValueError: a row does not fit the task, or no row is left for training.
    """

    def __init__(
        self,
        train: TableRows,
        held_out: TableRows | None,
        fraction: float,
        columns: dict[str, str],
        identify: Callable[[Row], str],
        order: Callable[[str, int], bytes] | None,
    ) -> None:
        self._columns = columns
        self._order = order
        self._tables = {"train": train, "heldOut": held_out or train}
        self._positions = {"train": array("Q"), "heldOut": array("Q")}
        held_out_hashes = set()  # of the prompts in a separate table of held-out rows
        for found, text in self._identified(held_out, identify) if held_out is not None else ():
            self._positions["heldOut"].append(found.position)
            held_out_hashes.add(hash(text))
        shared = 0
        for found, text in self._identified(train, identify):
            held = fraction > 0 and is_held_out(text, fraction)
            self._positions["heldOut" if held else "train"].append(found.position)
            shared += hash(text) in held_out_hashes
        rows = len(self._positions["train"]) + (0 if held_out is not None else len(self._positions["heldOut"]))
        if rows == 0:
            raise ValueError(f"{train.where}: {train.path} is empty; give one with rows")
        if not self._positions["train"]:
            raise ValueError(f"{train.where}: all {rows} rows of {train.path} are held out; lower heldOutFraction")
        if held_out is not None and shared:
            log.warning("%s: %d rows of %s have a prompt that is held out too", held_out.where, shared, train.path)

    @property
    def files(self) -> list[tuple[str, Path]]:
        """Each file that rows are read from, with the field of the manifest that names it."""
        return [(table.where, file) for table in dict.fromkeys(self._tables.values()) for file in table.files]

    def size(self, split: str) -> int | None:
        """See :meth:`rljob.runner.data.Source.size`."""
        return len(self._positions[split])

    def problem(self, split: str, row: int) -> Row:
        """See :meth:`rljob.runner.data.Source.problem`."""
        positions = self._positions[split]
        if not positions:
            table = self._tables[split]
            raise ValueError(
                f"{table.where}: no row of {table.path} is held out, and the evaluation needs some; name a file or a "
                "split of held-out rows, or raise heldOutFraction"
            )
        number, place = divmod(row, len(positions))
        if self._order is not None:
            # The order of held-out rows does not depend on the pass, so every evaluation uses the same rows.
            key = self._order(split, number if split == "train" else 0)
            place = shuffled(place, len(positions), key)
        return self._renamed(self._tables[split].read(positions[place]))

    def _identified(self, table: TableRows, identify: Callable[[Row], str]) -> Iterator[tuple[LocatedRow, str]]:
        for found in table.rows():
            try:
                yield found, identify(self._renamed(found.row))
            except ValueError as error:
                raise ValueError(f"{table.where}: {table.path}, {found.place}: {error}") from None

    def _renamed(self, row: Row) -> Row:
        if not self._columns:
            return row
        taken = {new: value_of(row, old) for new, old in self._columns.items()}
        return {name: value for name, value in row.items() if name not in self._columns.values()} | taken


def draw_order(seed: int, task: str) -> Callable[[str, int], bytes]:
    """Return the function (split, number of the pass) → key of the order of a task's rows."""
    return lambda split, number: pass_key(seed, task, split, number)
