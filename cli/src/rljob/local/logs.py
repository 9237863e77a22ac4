"""Reads the logs of a run's parts as one stream, and keeps them short.

A part appends to logs/PART.log. When that is long its content moves to PART.log.1, and so on, and the file is emptied
under the part, which never notices. A line without a time of its own belongs to the line before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rljob.local.errors import CliError

MAX_BYTES = 32 << 20
KEPT = 3
CHECK_SECONDS = 5.0
POLL_SECONDS = 0.2

_TIME = re.compile(r"(?:--- started )?(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:,(\d{3}))?([+-]\d\d:\d\d)?")


@dataclass(frozen=True)
class Line:
    """One line of a part's log. ``time`` is unix time."""

    time: float
    part: str
    text: str


def names(directory: Path) -> list[str]:
    """Return the parts that have logs in the run directory."""
    return sorted(path.name.removesuffix(".log") for path in (directory / "logs").glob("*.log"))


def chosen(directory: Path, parts: Sequence[str]) -> list[str]:
    """Return ``parts``, or all that have logs when none is given.

    Raises:
        CliError: with exit code 2: one of them has no log.
    """
    known = names(directory)
    for part in parts:
        if part not in known:
            raise CliError(f"there is no log of {part!r} in {directory}/logs; name one of {', '.join(known)}", 2)
    return list(parts) or known


class Reader:
    """Reads the logs of a run from their beginning.

    Args:
        directory: the run directory.
        parts: whose lines; all, also parts that come later, when empty.
    """

    def __init__(self, directory: Path, parts: Sequence[str]) -> None:
        self._directory = directory
        self._parts = parts
        self._cursors: dict[str, _Cursor] = {}

    def history(self, tail: int | None = None) -> list[Line]:
        """Return the lines there are by time, the last ``tail`` of them."""
        lines = self._news()
        return lines if tail is None else lines[max(0, len(lines) - tail) :]

    def follow(self, going_on: Callable[[], bool]) -> Iterator[Line]:
        """Yield lines as they are written after those read, until the run no longer goes on."""
        last = False
        while not last:
            last = not going_on()  # asked first, so that what was written before the end is read
            yield from self._news()
            if not last:
                time.sleep(POLL_SECONDS)

    def _news(self) -> list[Line]:
        for part in self._parts or names(self._directory):
            if part not in self._cursors:
                self._cursors[part] = _Cursor(_path(self._directory, part), part)
        return list(heapq.merge(*(cursor.news() for cursor in self._cursors.values()), key=lambda line: line.time))


class _Cursor:
    """How far a part's log was read, the older files included."""

    def __init__(self, path: Path, part: str) -> None:
        self._path = path
        self._part = part
        self._position = -1  # in PART.log; -1: nothing was read, not even the older files
        self._time = 0.0  # of the last line
        self._rest = b""  # of a line that has no end yet

    def news(self) -> list[Line]:
        """Return what was written since, across a rotation."""
        data = b""
        with contextlib.suppress(FileNotFoundError):
            if self._position < 0:
                older = [_older(self._path, i) for i in range(KEPT, 0, -1)]
                data = b"".join(path.read_bytes() for path in older if path.exists())
                self._position = 0
            elif self._path.stat().st_size < self._position:
                data = _older(self._path, 1).read_bytes()[self._position :]
                self._position = 0
            with self._path.open("rb") as file:
                file.seek(self._position)
                newest = file.read()
            self._position += len(newest)
            data += newest
        return self._lines(data)

    def _lines(self, data: bytes) -> list[Line]:
        *whole, self._rest = (self._rest + data).split(b"\n")
        lines = []
        for raw in whole:
            text = raw.decode(errors="replace").rstrip("\r")
            self._time = _time_of(text) or self._time
            lines.append(Line(self._time, self._part, text))
        return lines


def _time_of(text: str) -> float | None:
    match = _TIME.match(text)
    if match is None:
        return None
    try:
        return datetime.fromisoformat(f"{match[1]}.{match[2] or '000'}{match[3] or ''}").timestamp()
    except ValueError:
        return None


async def keep_short(directory: Path) -> None:
    """Rotate the logs of a run whenever they are long, until cancelled."""
    while True:
        for part in names(directory):
            with contextlib.suppress(OSError):  # a full disk: the log stays as it is
                rotate(_path(directory, part), MAX_BYTES)
        await asyncio.sleep(CHECK_SECONDS)


def rotate(path: Path, max_bytes: int) -> None:
    """Empty a log longer than ``max_bytes`` after its content was kept as PATH.1; three older ones are kept."""
    if path.stat().st_size <= max_bytes:
        return
    copy = path.with_name(f"{path.name}.new")
    try:
        shutil.copyfile(path, copy)
    except OSError:  # a full disk: the older ones stay
        copy.unlink(missing_ok=True)
        raise
    for i in range(KEPT - 1, 0, -1):
        with contextlib.suppress(FileNotFoundError):
            _older(path, i).replace(_older(path, i + 1))
    copy.replace(_older(path, 1))
    with path.open("r+b") as file:
        file.truncate(0)


def _path(directory: Path, part: str) -> Path:
    return directory / "logs" / f"{part}.log"


def _older(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
