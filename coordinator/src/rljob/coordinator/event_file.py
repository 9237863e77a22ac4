"""TensorBoard event files.

Only the types of events are imported from TensorBoard. Its writer of records imports NumPy and all plugins: 0.4 s of
CPU time, in which the event loop of a coordinator that has just applied its first batch hardly runs.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary

from rljob.ledger.step_metrics import Line

CASTAGNOLI = 0x82F63B78
"""Polynomial of CRC-32C, least significant bit first."""
UINT32 = 0xFFFFFFFF


class EventFile:
    """A TensorBoard event file, flushed after each event.

    Args:
        directory: directory of the file.
        first: TensorBoard discards events of earlier files for this step and later ones.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, directory: Path, first: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files in the order of their names.
        path = directory / f"events.out.tfevents.{time.time_ns():019d}.{socket.gethostname()}"
        self._file = path.open("wb")
        try:
            self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
            self._write(Event(wall_time=time.time(), step=first, session_log=SessionLog(status=SessionLog.START)))
        except OSError:
            with contextlib.suppress(OSError):
                self.close()
            path.unlink(missing_ok=True)  # a file for every attempt would fill the directory
            raise

    def add(self, line: Line) -> None:
        """Write the metrics of a line."""
        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in line.items()
            if isinstance(value, int | float) and name not in ("step", "version", "time")
        ]
        step = line["step"] if line["kind"] == "step" else line["version"]
        self._write(Event(wall_time=line["time"], step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: Event) -> None:
        self._file.write(record(event.SerializeToString()))
        self._file.flush()


def record(data: bytes) -> bytes:
    """Return a record of an event file: length, checksum of the length, data, checksum of the data."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc(length)) + data + struct.pack("<I", masked_crc(data))


def masked_crc(data: bytes) -> int:
    """Return CRC-32C of data, rotated and shifted by a constant as records have it."""
    crc = UINT32
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= UINT32
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & UINT32


def _of_byte(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (CASTAGNOLI if byte & 1 else 0)
    return byte


_TABLE = [_of_byte(byte) for byte in range(256)]
