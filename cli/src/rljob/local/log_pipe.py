"""Writes a process's output to its log: the supervisor reads a pipe, and writes and rotates the file.

The supervisor is the only writer of the file, so a rotation loses no line and splits no line. If the supervisor is
killed, the pipe has no reader: a write of the process fails with EPIPE at once (or SIGPIPE ends the process) instead of
blocking, and the process is killed with its supervisor (:mod:`rljob.local.processes`). If the supervisor is stopped
(Ctrl-Z) or blocked (Ctrl-S), it does not read, and the process blocks after PIPE_BYTES of output.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

MAX_BYTES = 32 << 20
KEPT_ROTATIONS = 3
PIPE_BYTES = 1 << 20
CHUNK = 1 << 16
HEADER = "--- started "
"""Prefix of the line that precedes the output of a process."""


def rotated_path(path: Path, number: int) -> Path:
    """Return the name of a log after ``number`` rotations."""
    return path.with_name(f"{path.name}.{number}")


class RotatingLog:
    """A log file. Beyond MAX_BYTES it is renamed to PATH.1, PATH.1 to PATH.2, up to KEPT_ROTATIONS.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO = path.open("ab", buffering=0)
        self._size = self._file.tell()
        self._lost = 0  # bytes that did not fit on the disk

    def write(self, data: bytes) -> None:
        """Append ``data``; rotate at the end of a line. Bytes that do not fit on a full disk are lost, and counted."""
        end = data.rfind(b"\n") + 1
        if not end and self._size > 2 * MAX_BYTES:  # output without line ends, such as a progress bar
            end = len(data)
        if end and self._size + end > MAX_BYTES:
            self._append(data[:end])
            self._rotate()
            data = data[end:]
        if data:
            self._append(data)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, data: bytes) -> None:
        note = b"" if not self._lost else f"\n--- {self._lost} bytes of output lost: the disk was full\n".encode()
        try:
            written = self._file.write(note + data)
        except OSError:
            written = 0
        self._size += written
        if written < len(note):
            self._lost += len(data)
        else:
            self._lost = len(note) + len(data) - written

    def _rotate(self) -> None:
        """Start a new file. It is opened first: if that fails, no log is renamed and the current file stays in use."""
        temporary = self._path.with_name(f"{self._path.name}.new")
        with contextlib.suppress(OSError):  # the directory was removed, its owner changed, or the disk is full
            temporary.unlink(missing_ok=True)
            newest = temporary.open("ab", buffering=0)
            try:
                if self._path.exists():  # false if a user deleted it
                    for number in range(KEPT_ROTATIONS - 1, 0, -1):
                        with contextlib.suppress(FileNotFoundError):
                            rotated_path(self._path, number).replace(rotated_path(self._path, number + 1))
                    self._path.replace(rotated_path(self._path, 1))
                temporary.replace(self._path)
            except OSError:
                newest.close()
                raise
            self._file.close()
            self._file, self._size = newest, 0


class LogPipe:
    """The pipe to which one process writes its output, and the log that receives it.

    Args:
        path: of the log.
        note: text for the header line.

    Raises:
        OSError: log or pipe cannot be created.
    """

    def __init__(self, path: Path, note: str = "") -> None:
        path.parent.mkdir(exist_ok=True)
        self._log = RotatingLog(path)
        try:
            self._reading, self.writing = os.pipe()
        except OSError:
            self._log.close()
            raise
        os.set_blocking(self._reading, False)
        with contextlib.suppress(OSError):  # over the limit of this user: the pipe keeps the default size
            fcntl.fcntl(self._reading, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._closed = False
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        self._log.write(f"{HEADER}{now} {note}\n".encode())
        asyncio.get_running_loop().add_reader(self._reading, self._read)

    def close_writing(self) -> None:
        """Close this process's copy of the writing end, so that the pipe ends when the child ends."""
        os.close(self.writing)

    def close(self) -> None:
        """Write the rest of the pipe to the log and close both. The process must have ended."""
        with contextlib.suppress(BlockingIOError):  # a descendant still has the pipe open
            for _ in range(2 * PIPE_BYTES // CHUNK):
                if not self._closed:
                    self._read()
        self._close()

    def _read(self) -> None:
        data = os.read(self._reading, CHUNK)
        if data:
            self._log.write(data)
        else:
            self._close()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            asyncio.get_running_loop().remove_reader(self._reading)
            os.close(self._reading)
            self._log.close()
