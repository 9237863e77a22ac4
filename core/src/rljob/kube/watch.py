"""The format of a watch: a body of lines, each with one JSON event."""

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
    """The part of aiohttp.StreamReader that :func:`split_lines` needs."""

    def iter_any(self) -> AsyncIterator[bytes]:
        """Yield bytes as they arrive."""
        ...


def decode_event(line: bytes) -> WatchEvent:
    """Return the event in a line.

    Raises:
        ApiError: the line is an ERROR event; GoneError if the resource version is too old.
        msgspec.MsgspecError: the line is not an event.
    """
    event = _event.decode(line)
    if event.type == "ERROR":
        raise error_of(msgspec.json.decode(event.object, type=_ErrorObject).code, bytes(event.object))
    return event


async def split_lines(stream: Chunks) -> AsyncGenerator[bytes, None]:
    """Yield lines of any length. StreamReader.readline limits a line to 128 KiB, but an object may have 1.5 MiB."""
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
