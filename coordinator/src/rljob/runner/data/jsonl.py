"""Reader of JSON lines: one object per line, UTF-8. Blank lines are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from rljob.runner.data.table import LocatedRow, Row

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JsonLines:
    """A :class:`rljob.runner.data.table.TableRows` of a file of JSON lines; a position is a line's offset in bytes.

    Args:
        path: the file.
        where: the field of the manifest that names it.
    """

    def __init__(self, path: Path, where: str) -> None:
        self.path = path
        self.where = where
        self.files = [path]
        self._state = _state(path)

    def rows(self) -> Iterator[LocatedRow]:
        """Yield all rows in order.

        Raises:
            ValueError: a line is not a JSON object.
        """
        offset = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    yield LocatedRow(offset, f"line {number}", self._decode(line, f"line {number}"))
                offset += len(line)

    def read(self, position: int) -> Row:
        """Return the row at an offset in bytes.

        Raises:
            ValueError: the file has changed since it was opened.
        """
        if _state(self.path) != self._state:
            raise ValueError(
                f"{self.where}: {self.path} was changed while the run reads it; put the file back, or choose another "
                "--run-dir"
            )
        with self.path.open("rb") as file:
            file.seek(position)
            return self._decode(file.readline(), f"byte {position}")

    def _decode(self, line: bytes, place: str) -> Row:
        here = f"{self.where}: {self.path}, {place}"
        try:
            row = msgspec.json.decode(line.removeprefix(BYTE_ORDER_MARK))
        except UnicodeDecodeError:
            raise ValueError(f"{here}: not UTF-8; save the file as UTF-8") from None
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"{here}: not JSON: {error}; each line must be one JSON object") from None
        if not isinstance(row, dict):
            raise ValueError(f"{here}: not a JSON object; each line must be one, like {{'question': …}}")
        return row


def _state(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino
