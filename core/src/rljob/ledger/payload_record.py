"""The record of one completion in a payload segment."""

from __future__ import annotations

import msgspec

from rljob.ledger.segments import record_digest
from rljob.protocol.shared_messages import VersionSpan

INT32 = 4
"""Bytes of a token id, and of a float32 log-probability."""


class PayloadRecord(msgspec.Struct, array_like=True):
    """A completion. The engine generated it from ``given`` and ``token_ids`` of all records of the turns that its turn
    continues and of its own turn before this one, and its own ``given``."""

    sample: str
    turn: int
    attempt: int
    given: bytes  # int32: the prompt or the observation; empty if the record continues an interrupted turn
    token_ids: bytes  # int32
    logprobs: bytes  # float32
    spans: list[VersionSpan]
    finish: str
    context: str  # rljob.protocol.contexts.context_digest of what the engine generated from, as its agent reported it
    branch: str = ""  # see rljob.protocol.branches


class ModelLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities of a sample under a model of a frozen pool, in a payload segment."""

    sample: str
    role: str  # reference | teachers[0] | teachers[1] …
    logprobs: bytes  # float32, of each token of its loss mask


class TextRecord(msgspec.Struct, array_like=True):
    """The text of the last response of a sample with a reward, in the segments of texts; ``branch``: of the text."""

    sample: str
    text: str
    branch: str = ""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PayloadRecord)
_logprobs_decoder = msgspec.msgpack.Decoder(ModelLogprobs)
_text_decoder = msgspec.msgpack.Decoder(TextRecord)


def encode_record(record: PayloadRecord | ModelLogprobs) -> bytes:
    """Return a record as the bytes of a segment."""
    return _encoder.encode(record)


def decode_record(payload: bytes) -> PayloadRecord:
    """Return the record that :func:`encode_record` encoded.

    Raises:
        msgspec.MsgspecError: ``payload`` is not a record.
    """
    return _decoder.decode(payload)


def decode_logprobs(payload: bytes) -> ModelLogprobs:
    """Return the record that :func:`encode_record` encoded; msgspec.MsgspecError: ``payload`` is not such a record."""
    return _logprobs_decoder.decode(payload)


def encode_text(record: TextRecord) -> bytes:
    """Return a text as the bytes of a segment."""
    return _encoder.encode(record)


def decode_text(content: bytes) -> TextRecord:
    """Return the record that :func:`encode_text` encoded; msgspec.MsgspecError: ``content`` is not such a record."""
    return _text_decoder.decode(content)


def payload_digest(payload: bytes) -> str:
    """Return the digest of a payload record, as the ledger stores it."""
    return record_digest(payload).hex()
