"""Where the records of a run are: the interface between the ledger and the payload.

The ledger has a row for each record, with its reference and its digest, and nothing else knows where the bytes are.
:mod:`rljob.ledger.segments` has the implementations: files, and memory for simulations. Another one, for example
object storage, must keep the rules of these methods.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class PayloadError(Exception):
    """A record is missing or damaged."""


class Location(NamedTuple):
    """Reference to a record: segment number, offset and length in bytes."""

    segment: int
    offset: int
    length: int


class RecordStore(Protocol):
    """Records of one run, in segments that are removed as a whole. One thread appends and synchronizes; any thread
    reads."""

    def append(self, payload: bytes, digest: bytes | None = None) -> Location:
        """Add a record; return its reference, whose segment is that of the record before or a later one.

        Args:
            payload: the record.
            digest: its :func:`~rljob.ledger.segments.record_digest`, if it is known.
        """

    def sync(self) -> None:
        """Make all added records durable. The ledger's transaction with their references follows."""

    def read(self, location: Location) -> bytes:
        """Return a durable record.

        Raises:
            PayloadError: it is missing or damaged.
        """

    def remove_below(self, segment: int) -> None:
        """Remove all segments before ``segment``, except the one that grows: no reader needs them."""

    def close(self) -> None:
        """Synchronize, and free what the store holds."""
