"""Readers of Parquet files and of directories that the `datasets` library saved."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from rljob.runner.data.table import LocatedRow, Row

KEPT_BYTES = 256 << 20
ROWS_AT_A_TIME = 1024


class ParquetRows:
    """A :class:`rljob.runner.data.table.TableRows` of a Parquet file; a position is a row's number.

    A row is read with its whole row group. The most recently read groups are cached, up to KEPT_BYTES.

    Args:
        path: the file.
        where: the field of the manifest that names it.

    Raises:
        ValueError: the file is not a Parquet file.
    """

    def __init__(self, path: Path, where: str) -> None:
        self.path = path
        self.where = where
        self.files = [path]
        with _as_user_error(self):
            self._file = pq.ParquetFile(path, memory_map=True)
        groups = range(self._file.metadata.num_row_groups)
        self._starts = _starts([self._file.metadata.row_group(group).num_rows for group in groups])
        self._kept: OrderedDict[int, pa.Table] = OrderedDict()

    def rows(self) -> Iterator[LocatedRow]:
        """Yield all rows in order.

        Raises:
            ValueError: the file is damaged.
        """
        batches = self._file.iter_batches(ROWS_AT_A_TIME, use_threads=False)
        with _as_user_error(self):
            yield from _rows(batches)

    def read(self, position: int) -> Row:
        """Return row ``position``."""
        group, place = _find(self._starts, position)
        table = self._kept.pop(group, None)
        if table is None:
            with _as_user_error(self):
                table = self._file.read_row_group(group, use_threads=False)
        self._kept[group] = table
        while len(self._kept) > 1 and sum(kept.nbytes for kept in self._kept.values()) > KEPT_BYTES:
            self._kept.popitem(last=False)
        return _plain(table.slice(place, 1).to_pylist()[0])


class SavedRows:
    """A :class:`rljob.runner.data.table.TableRows` of one split that ``Dataset.save_to_disk`` wrote; a position is a
    row's number.

    state.json lists the files; each is an Arrow stream. The files are memory-mapped.

    Args:
        path: the split's directory.
        where: the field of the manifest that names it.

    Raises:
        ValueError: the directory is not such a split.
    """

    def __init__(self, path: Path, where: str) -> None:
        self.path = path
        self.where = where
        state = _read_json(path / "state.json", where)
        if state.get("_indices_data_files"):
            raise ValueError(
                f"{where}: {path} holds a selection of rows in the format of old versions of datasets; load and save "
                "it again with a newer version"
            )
        streams = [path / entry["filename"] for entry in state.get("_data_files", [])]
        self.files = [path / "state.json", *streams]
        with _as_user_error(self):
            tables = [pa.ipc.open_stream(pa.memory_map(str(stream))).read_all() for stream in streams]
        self._batches = [batch for table in tables for batch in table.to_batches()]
        self._starts = _starts([batch.num_rows for batch in self._batches])

    def rows(self) -> Iterator[LocatedRow]:
        """Yield all rows in order."""
        with _as_user_error(self):
            yield from _rows(self._batches)

    def read(self, position: int) -> Row:
        """Return row ``position``."""
        batch, place = _find(self._starts, position)
        return _plain(self._batches[batch].slice(place, 1).to_pylist()[0])


def open_split(directory: Path, split: str | None, where: str) -> SavedRows:
    """Return the rows of a split of a directory; see :func:`saved_split`."""
    return SavedRows(saved_split(directory, split, where), where)


def saved_split(directory: Path, split: str | None, where: str) -> Path:
    """Return the directory of a split of a Dataset or DatasetDict that ``save_to_disk`` wrote.

    Args:
        directory: of the Dataset or DatasetDict.
        split: name of the split; None: the only split, or ``train``.
        where: the field of the manifest that names it.

    Raises:
        ValueError: ``save_to_disk`` did not write the directory, or it has no such split.
    """
    if not directory.is_dir():
        raise ValueError(f"{where}: there is no directory {directory}; correct the path")
    if (directory / "dataset_dict.json").is_file():
        splits = _read_json(directory / "dataset_dict.json", where).get("splits", [])
        chosen = split or (splits[0] if len(splits) == 1 else "train")
        if chosen not in splits:
            raise ValueError(f"{where}: {directory} has no split {chosen!r}, but {', '.join(splits)}; name one of them")
        return directory / chosen
    if not (directory / "state.json").is_file():
        raise ValueError(
            f"{where}: {directory} was not written by save_to_disk of the datasets library (it holds neither "
            "dataset_dict.json nor state.json); save it with save_to_disk, or use jsonl or parquet"
        )
    if split not in (None, _read_json(directory / "state.json", where).get("_split")):
        raise ValueError(f"{where}: {directory} holds one dataset without splits, not {split!r}; leave the split out")
    return directory


def _read_json(path: Path, where: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, ValueError) as error:
        raise ValueError(f"{where}: {path} cannot be read: {error}; save the dataset again") from None


@contextmanager
def _as_user_error(table: ParquetRows | SavedRows) -> Iterator[None]:
    """Raise errors of Arrow as ValueError with the field and the file."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        message = " ".join(str(error).split())
        raise ValueError(f"{table.where}: {table.path} cannot be read: {message[:300]}; write it again") from None


def _rows(batches: Iterable[pa.RecordBatch]) -> Iterator[LocatedRow]:
    rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
    for number, row in enumerate(rows):
        yield LocatedRow(number, f"row {number + 1}", _plain(row))


def _starts(lengths: Sequence[int]) -> list[int]:
    """Return the number of the first row of each part."""
    return [0, *itertools.accumulate(lengths)][:-1]


def _find(starts: Sequence[int], position: int) -> tuple[int, int]:
    """Return the index of the part that holds a row, and the row's index in the part."""
    part = bisect_right(starts, position) - 1  # of the parts with equal starts only the last has rows
    return part, position - starts[part]


def _plain(row: dict[str, Any]) -> Row:
    """Return a row in the types of JSON: dates as ISO text, bytes as base64, other types as text."""
    plain: Row = msgspec.to_builtins(row, str_keys=True, enc_hook=str)
    return plain
