"""Reads the logs of a run's components as one stream, by time.

The newest log of a component is logs/NAME.log, logs/NAME.log.1 is older (:mod:`rljob.local.log_pipe`). A line without a
timestamp has the time of the line before it.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from rljob.local import log_pipe
from rljob.local.errors import CliError

POLL_SECONDS = 0.2

_TIME = re.compile(r"(?:--- started )?(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:,(\d{3}))?([+-]\d\d:\d\d)?")


@dataclass(frozen=True)
class Line:
    """One line of a component's log. ``time`` is unix time."""

    time: float
    component: str
    text: str


def names(directory: Path) -> list[str]:
    """Return the components that have logs in the run directory."""
    return sorted(path.name.removesuffix(".log") for path in (directory / "logs").glob("*.log"))


def select_components(directory: Path, components: Sequence[str]) -> list[str]:
    """Return ``components``; if it is empty, all components that have logs.

    Raises:
        CliError: with exit code 2: a component has no log.
    """
    known = names(directory)
    for name in components:
        if name not in known:
            raise CliError(f"there is no log of {name!r} in {directory}/logs; name one of {', '.join(known)}", 2)
    return list(components) or known


class LogReader:
    """Reads the logs of a run from their beginning.

    Args:
        directory: the run directory.
        components: to read; empty: all, including those that start later.
    """

    def __init__(self, directory: Path, components: Sequence[str]) -> None:
        self._directory = directory
        self._components = components
        self._cursors: dict[str, _Cursor] = {}

    def history(self, tail: int | None = None) -> list[Line]:
        """Return the existing lines by time, the last ``tail`` of them."""
        lines = self._new_lines()
        return lines if tail is None else lines[max(0, len(lines) - tail) :]

    def follow(self, running: Callable[[], bool]) -> Iterator[Line]:
        """Yield lines as they are written after those read, until the run is no longer running."""
        last = False
        while not last:
            last = not running()  # checked before reading, so that lines written before the end are read
            yield from self._new_lines()
            if not last:
                time.sleep(POLL_SECONDS)

    def _new_lines(self) -> list[Line]:
        for name in self._components or names(self._directory):
            if name not in self._cursors:
                self._cursors[name] = _Cursor(self._directory / "logs" / f"{name}.log", name)
        return list(heapq.merge(*(cursor.new_lines() for cursor in self._cursors.values()), key=lambda line: line.time))


class _Cursor:
    """A position in a component's log. A rotation renames the open file; the cursor keeps reading it."""

    def __init__(self, path: Path, component: str) -> None:
        self._path = path
        self._component = component
        self._file: BinaryIO | None = None
        self._time = 0.0  # of the last line
        self._rest = b""  # of the last line, which has no line end yet

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()

    def new_lines(self) -> list[Line]:
        """Return the lines written since the last call, across any rotations."""
        data = b""
        while True:
            rotation = self._rotation()
            if self._file is not None:
                if os.fstat(self._file.fileno()).st_size < self._file.tell():  # a user has truncated the file
                    self._file.seek(0)
                data += self._file.read()  # after _rotation: a file that was rotated before is complete
            newer = self._open_newer(rotation)
            if newer is None:  # the open file is the newest, or a rotation is in progress
                return self._lines(data)
            if self._rotation() != rotation:  # a rotation may have moved the files while the next one was opened
                newer.close()
                continue
            if self._file is not None:
                self._file.close()
            self._file = newer

    def _rotation(self) -> int:
        """Return how often the open file was rotated; KEPT_ROTATIONS + 1 if it was removed or none is open."""
        if self._file is not None:
            own = os.fstat(self._file.fileno())
            for number in range(log_pipe.KEPT_ROTATIONS + 1):
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(own, self._path_of(number).stat()):
                        return number
        return log_pipe.KEPT_ROTATIONS + 1

    def _open_newer(self, rotation: int) -> BinaryIO | None:
        """Open the oldest file that is newer than ``rotation``."""
        for number in range(rotation - 1, -1, -1):
            with contextlib.suppress(FileNotFoundError):
                return self._path_of(number).open("rb")
        return None

    def _path_of(self, number: int) -> Path:
        return log_pipe.rotated_path(self._path, number) if number else self._path

    def _lines(self, data: bytes) -> list[Line]:
        *whole, self._rest = (self._rest + data).split(b"\n")
        lines = []
        for raw in whole:
            text = raw.decode(errors="replace").rstrip("\r")
            self._time = _time_of(text) or self._time
            lines.append(Line(self._time, self._component, text))
        return lines


def _time_of(text: str) -> float | None:
    match = _TIME.match(text)
    if match is None:
        return None
    try:
        return datetime.fromisoformat(f"{match[1]}.{match[2] or '000'}{match[3] or ''}").timestamp()
    except ValueError:
        return None
