"""One completion as a payload segment holds it."""

from __future__ import annotations

import blake3
import msgspec

from rljob.protocol.messages import VersionSpan

INT32 = 4
"""Bytes of a token id, and of a float32 log-probability."""


class PayloadRecord(msgspec.Struct, array_like=True):
    """What a payload segment holds of one completion. ``prompt`` is the turn's whole context."""

    sample: str
    turn: int
    attempt: int
    prompt: bytes  # int32
    token_ids: bytes  # int32
    logprobs: bytes  # float32
    spans: list[VersionSpan]
    finish: str


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PayloadRecord)


def encode_record(record: PayloadRecord) -> bytes:
    """Return a record as the bytes of a segment."""
    return _encoder.encode(record)


def decode_record(payload: bytes) -> PayloadRecord:
    """Return the record that :func:`encode_record` made these bytes of.

    Raises:
        msgspec.MsgspecError: it is no such record.
    """
    return _decoder.decode(payload)


def payload_digest(payload: bytes) -> str:
    """Return the digest the ledger keeps of a payload record."""
    return blake3.blake3(payload).hexdigest(16)
