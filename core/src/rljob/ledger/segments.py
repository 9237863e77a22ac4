"""Append-only segment files: the payload, which is the engines' completions, and the texts of responses.

A record is a length and a blake3 digest, followed by the bytes. A record is fsynced before any acknowledgement that
depends on it; a record torn by a crash was never acknowledged and is never referenced. A segment of the payload is
unlinked once the oldest kept checkpoint covers all its records.
"""

from __future__ import annotations

import logging
import os
import struct
from pathlib import Path
from typing import BinaryIO

import blake3

from rljob.ledger.record_store import Location, PayloadError
from rljob.protocol.sync_path import sync_path

log = logging.getLogger(__name__)

HEADER = struct.Struct("<I16s")  # length of the payload, first 16 bytes of its blake3 digest
SEGMENT_BYTES = 64 << 20
BUFFER_BYTES = 1 << 20
"""A commit's records are written together."""
MEMORY_SEGMENT_RECORDS = 4096


def record_digest(payload: bytes) -> bytes:
    """Return the digest in the header of a record: 16 bytes."""
    return blake3.blake3(payload).digest(16)


class PayloadReader:
    """Reads the segment files in ``directory``, which may be missing."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[int, int] = {}

    def path(self, segment: int) -> Path:
        """Return the path of a segment, whether or not the file exists."""
        return self._directory / f"{segment:08d}.segment"

    def segments(self) -> list[int]:
        """Return the numbers of the existing segments, in order."""
        return sorted(int(path.stem) for path in self._directory.glob("*.segment"))

    def read(self, location: Location) -> bytes:
        """Return a durable record.

        Raises:
            PayloadError: the file is missing, or the record is damaged.
        """
        try:
            if location.segment not in self._files:
                self._files[location.segment] = os.open(self.path(location.segment), os.O_RDONLY)
            data = os.pread(self._files[location.segment], HEADER.size + location.length, location.offset)
        except (OSError, ValueError, TypeError, OverflowError, MemoryError) as error:  # also of a damaged location
            raise PayloadError(f"payload segment {location.segment} cannot be read: {error}") from error
        payload = data[HEADER.size :]
        if len(payload) != location.length or data[: HEADER.size] != HEADER.pack(len(payload), record_digest(payload)):
            raise PayloadError(f"payload segment {location.segment} is damaged at byte {location.offset}")
        return payload

    def close_segment(self, segment: int) -> None:
        """Close the file of a segment."""
        descriptor = self._files.pop(segment, None)
        if descriptor is not None:
            os.close(descriptor)

    def close(self) -> None:
        """Close all files."""
        for segment in list(self._files):
            self.close_segment(segment)


class Segments:
    """The segment files of one run: a :class:`~rljob.ledger.record_store.RecordStore`."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._reader = PayloadReader(directory)
        self._number = max(self._reader.segments(), default=-1) + 1
        self._file: BinaryIO | None = None
        self._end = 0  # of the file, with what is not written yet: to ask the file is a call of the system
        self._dirty = False  # there are records after the last sync

    def append(self, payload: bytes, digest: bytes | None = None) -> Location:
        """Write a record; it is durable after :meth:`sync`. ``digest``: :func:`record_digest`, if it is known."""
        if self._file is None or self._end >= SEGMENT_BYTES:
            self._roll()
        assert self._file is not None
        offset = self._end
        self._end += self._file.write(HEADER.pack(len(payload), digest or record_digest(payload)) + payload)
        self._dirty = True
        return Location(self._number, offset, len(payload))

    def _roll(self) -> None:
        if self._file is not None:
            self.sync()
            self._file.close()
            self._number += 1
        self._file, self._end = self._reader.path(self._number).open("xb", BUFFER_BYTES), 0
        sync_path(self._directory)

    def sync(self) -> None:
        """Make all appended records durable."""
        if self._file is not None and self._dirty:
            self._file.flush()
            os.fdatasync(self._file.fileno())
            self._dirty = False

    def read(self, location: Location) -> bytes:
        """Return a durable record.

        Raises:
            PayloadError: the file is missing, or the record is damaged.
        """
        return self._reader.read(location)

    def remove_below(self, segment: int) -> None:
        """Unlink segments before ``segment``."""
        for number in self._reader.segments():
            if number < segment and number != self._number:
                self._reader.close_segment(number)
                self._reader.path(number).unlink()
                log.info("removed payload segment %d: checkpoints cover it", number)

    def close(self) -> None:
        """Close all files."""
        if self._file is not None:
            self.sync()
            self._file.close()
            self._file = None
        self._reader.close()


class MemorySegments:
    """The records of a simulated run, in memory: a :class:`~rljob.ledger.record_store.RecordStore`."""

    def __init__(self) -> None:
        self._records: dict[int, list[bytes]] = {0: []}  # segment number → its records; the last one is open

    def append(self, payload: bytes, digest: bytes | None = None) -> Location:
        """Keep a record."""
        number, records = next(reversed(self._records.items()))
        if len(records) >= MEMORY_SEGMENT_RECORDS:
            number, records = number + 1, self._records.setdefault(number + 1, [])
        records.append(payload)
        return Location(number, len(records) - 1, len(payload))

    def sync(self) -> None:
        """Do nothing: memory is as durable as the run."""

    def read(self, location: Location) -> bytes:
        """Return a record."""
        return self._records[location.segment][location.offset]

    def remove_below(self, segment: int) -> None:
        """Forget segments before ``segment``."""
        for number in [number for number in list(self._records)[:-1] if number < segment]:
            del self._records[number]

    def close(self) -> None:
        """Forget all records."""
        self._records.clear()
