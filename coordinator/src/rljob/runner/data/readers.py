"""Opens the source of a task's data."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from rljob.api.tasks import DatasetsDirectory, ReasoningGym, Table, Task
from rljob.runner.data import Source
from rljob.runner.data.jsonl import JsonLines
from rljob.runner.data.seed_rows import SeedRows
from rljob.runner.data.table import Row, TableRows, TableSource, draw_order
from rljob.runner.prompt_content import content_of, identity


@dataclass(frozen=True)
class DataReaders:
    """Readers of the kinds of data whose libraries are slow to import (seconds for reasoning-gym).

    main.py imports the readers that the job needs; the others are None.
    """

    reasoning_gym: Callable[[ReasoningGym, int, str], Source] | None = None
    parquet: Callable[[Path, str], TableRows] | None = None
    datasets: Callable[[Path, str | None, str], TableRows] | None = None


RowCheck: TypeAlias = Callable[[Row], None]
"""Raises ValueError for a row that a task's reward cannot score."""


def open_source(
    task: Task, row_check: RowCheck | None, seed: int, where: str, readers: DataReaders, path: Callable[[str], Path]
) -> Source:
    """Return the source of a task's problems.

    Args:
        task: of a resolved job.
        row_check: row check of the task's reward, applied to all rows of files and directories.
        seed: seed of the job.
        where: path of the task's ``data`` in the manifest, for errors.
        readers: those that the task needs.
        path: resolves job://PATH or a plain path.

    Raises:
        ValueError: the data is invalid; the message names the field, the cause and the remedy.
    """
    data = task.data
    if data.seeds is not None:
        return SeedRows(data.seeds, seed)
    if data.reasoning_gym is not None:
        assert readers.reasoning_gym is not None
        return readers.reasoning_gym(data.reasoning_gym, seed, f"{where}.reasoningGym")
    if data.datasets is not None:
        train, held_out = _splits(data.datasets, f"{where}.datasets", readers, path)
        fraction, shuffle = data.datasets.held_out_fraction, data.datasets.shuffle
    else:
        kind, table = ("jsonl", data.jsonl) if data.jsonl is not None else ("parquet", data.parquet)
        assert table is not None, "a task has exactly one source"
        read = JsonLines if kind == "jsonl" else readers.parquet
        assert read is not None
        train, held_out = _files(table, f"{where}.{kind}", read, path)
        fraction, shuffle = table.held_out_fraction, table.shuffle
    order = draw_order(seed, task.name) if shuffle else None
    return TableSource(train, held_out, fraction or 0.0, data.columns, _identify(task, row_check), order)


def _files(
    table: Table, where: str, read: Callable[[Path, str], TableRows], path: Callable[[str], Path]
) -> tuple[TableRows, TableRows | None]:
    train = read(_file(path(table.path), f"{where}.path"), f"{where}.path")
    if table.held_out_path is None:
        return train, None
    return train, read(_file(path(table.held_out_path), f"{where}.heldOutPath"), f"{where}.heldOutPath")


def _splits(
    data: DatasetsDirectory, where: str, readers: DataReaders, path: Callable[[str], Path]
) -> tuple[TableRows, TableRows | None]:
    assert readers.datasets is not None
    train = readers.datasets(path(data.path), data.split, f"{where}.{'split' if data.split else 'path'}")
    if data.held_out_split is None:
        return train, None
    return train, readers.datasets(path(data.path), data.held_out_split, f"{where}.heldOutSplit")


def _file(path: Path, where: str) -> Path:
    if path.exists() and not path.is_file():
        raise ValueError(f"{where}: {path} is {'a directory' if path.is_dir() else 'not a regular file'}; name a file")
    try:
        path.open("rb").close()
    except FileNotFoundError:
        raise ValueError(f"{where}: there is no file {path}; correct the path") from None
    except OSError as error:
        raise ValueError(f"{where}: {path} cannot be read: {(error.strerror or str(error)).lower()}") from None
    return path


def _identify(task: Task, row_check: RowCheck | None) -> Callable[[Row], str]:
    """Return a function that checks a row against task and reward, and returns the text that identifies its prompt."""

    def identify(row: Row) -> str:
        has_prompt = task.environment is None and task.agent is None
        text = identity(content_of(task, row)) if has_prompt else json.dumps(row, sort_keys=True)
        if row_check is not None:
            row_check(row)
        return text

    return identify
