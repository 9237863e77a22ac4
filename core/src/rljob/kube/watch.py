"""The format of watches: a body of lines, each one JSON event."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol

import msgspec

from rljob.kube.errors import error_of


class WatchEvent(msgspec.Struct):
    """An event. ``type``: ADDED, MODIFIED, DELETED, BOOKMARK or ERROR; ``object`` is decoded by the caller."""

    type: str
    object: msgspec.Raw


class _ErrorObject(msgspec.Struct):
    code: int = 500


_event = msgspec.json.Decoder(WatchEvent)


class Chunks(Protocol):
    """The part of aiohttp.StreamReader that is needed."""

    def iter_any(self) -> AsyncIterator[bytes]:
        """Yield bytes as they arrive."""
        ...


def decode_event(line: bytes) -> WatchEvent:
    """Return the event in a line.

    Raises:
        ApiError: it is an ERROR event; GoneError if the resource version is too old.
        msgspec.MsgspecError: it is no event.
    """
    event = _event.decode(line)
    if event.type == "ERROR":
        raise error_of(msgspec.json.decode(event.object, type=_ErrorObject).code, bytes(event.object))
    return event


async def split_lines(stream: Chunks) -> AsyncGenerator[bytes, None]:
    """Yield lines of any length: StreamReader.readline limits them to 128 KiB, and an object may have 1.5 MiB."""
    parts: list[bytes] = []
    async for chunk in stream.iter_any():
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            parts.append(end)
            line = b"".join(parts)
            parts.clear()
            if line:
                yield line
        if rest:
            parts.append(rest)
