"""Frames: what the peers send over their WebSockets. A frame is a msgpack list of messages, at most MAX_FRAME_BYTES
long."""

from __future__ import annotations

from typing import Any

import msgspec

MAX_FRAME_BYTES = 64 << 20
MESSAGES_PER_FRAME = 256
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MemoryError)
"""What a msgspec decoder raises on arbitrary bytes: not only its own errors."""

_encoder = msgspec.msgpack.Encoder()


def encode(message: Any) -> msgspec.Raw:
    """Return one message encoded, to be put into a frame later."""
    return msgspec.Raw(_encoder.encode(message))


def encode_frame(messages: list[Any]) -> bytes:
    """Return one frame holding ``messages``, encoded already or not."""
    return _encoder.encode(messages)


def frame_decoder(union: Any) -> msgspec.msgpack.Decoder[list[Any]]:
    """Return a decoder of frames whose messages are of ``union``, for example FromAgent."""
    return msgspec.msgpack.Decoder(list[union])


def frame_length(outbox: list[msgspec.Raw]) -> int:
    """Return how many of the first encoded messages go into one frame: at least one."""
    size = 0
    for count, message in enumerate(outbox[:MESSAGES_PER_FRAME]):
        size += len(memoryview(message))
        if count and size > MAX_FRAME_BYTES // 2:
            return count
    return min(len(outbox), MESSAGES_PER_FRAME)
