"""What the clients of reward and environment services share: their session, and how they read a reply."""

from __future__ import annotations

import aiohttp

CONNECT_SECONDS = 5.0


def service_session() -> aiohttp.ClientSession:
    """Return a session for all clients of a process. It stores no cookies and decompresses no replies, because a small
    compressed reply can be large."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        headers={"Accept-Encoding": "identity"},
    )


async def read_at_most(content: aiohttp.StreamReader, most: int) -> bytes:
    """Return the body of a reply, or its first ``most`` bytes."""
    body = bytearray()
    while len(body) < most and (part := await content.read(most - len(body))):
        body += part
    return bytes(body)


def one_line(text: bytes) -> str:
    """Return a part of a reply for a message."""
    return " ".join(text.decode(errors="replace").split())
