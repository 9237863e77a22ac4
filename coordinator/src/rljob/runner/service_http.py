"""What the clients of reward and environment services share: session, addresses of replicas, replies, and lines on a
service that is away."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import socket
from collections.abc import Collection

import aiohttp
from yarl import URL

from rljob.protocol.watched_socket import watched_socket

log = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
MAX_REASONS = 5
"""Reasons that are logged while a service does not answer."""
_NUMBER = re.compile(r"\d[\d.,]*")


def service_session() -> aiohttp.ClientSession:
    """Return a session for all clients of a process. It stores no cookies and decompresses no replies, because a small
    compressed reply can be large. A connection breaks soon after its peer has vanished."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, socket_factory=watched_socket),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        headers={"Accept-Encoding": "identity"},
    )


def has_name(url: URL) -> bool:
    """Return whether the host of a service is a name, which may stand for several replicas."""
    try:
        ipaddress.ip_address(url.host or "")
    except ValueError:
        return True
    return False


async def addresses_of(url: URL) -> Collection[str]:
    """Return the addresses of the name of a service.

    Raises:
        OSError: it has none.
    """
    assert url.host is not None, "the manifest has checked the address"
    found = await asyncio.get_running_loop().getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
    return {str(entry[4][0]) for entry in found}


def at_replica(url: URL, address: str) -> tuple[URL, dict[str, str]]:
    """Return the URL of a request at a replica, and the header that keeps the service's own name; for an empty address
    the URL itself."""
    return (url.with_host(address), {"Host": url.authority}) if address else (url, {})


async def read_at_most(content: aiohttp.StreamReader, most: int) -> bytes:
    """Return the body of a reply, or its first ``most`` bytes."""
    body = bytearray()
    while len(body) < most and (part := await content.read(most - len(body))):
        body += part
    return bytes(body)


def one_line(text: bytes) -> str:
    """Return a part of a reply for a message."""
    return " ".join(text.decode(errors="replace").split())


def at(address: str) -> str:
    """Return the address of a replica for a message; empty: the service has one address."""
    return f" at {address}" if address else ""


class AvailabilityLog:
    """Logs that a replica of a service does not answer, and that it answers again, once each; also new reasons for
    which it does not.

    Args:
        service: what it is, with its name.
    """

    def __init__(self, service: str) -> None:
        self._service = service
        self._unavailable: dict[str, set[str]] = {}  # addresses, as logged → reasons without their numbers

    def report(self, address: str, why: str) -> str:
        """Log a change. ``why`` it does not answer; empty: it answers. Return ``why``."""
        if not why:
            if self._unavailable.pop(address, None):
                log.warning("%s%s answers again", self._service, at(address))
            return why
        known, kind = self._unavailable.setdefault(address, set()), _NUMBER.sub("0", why)
        if kind not in known and len(known) < MAX_REASONS:
            log.warning("%s%s does not answer (%s); asking again until it does", self._service, at(address), why)
            known.add(kind)
        return why
