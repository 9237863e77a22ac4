"""Sockets of clients that notice a peer which vanished: a deleted pod or a lost node closes no connection."""

from __future__ import annotations

import socket
from typing import Any

PROBES = {
    "TCP_KEEPIDLE": 2,  # seconds without data until the first probe
    "TCP_KEEPINTVL": 1,  # seconds between probes
    "TCP_KEEPCNT": 3,  # probes without an answer
}
UNREAD_MILLISECONDS = 10_000


def watched_socket(address: tuple[Any, ...]) -> socket.socket:
    """Return a socket for a connection that breaks about five seconds after its peer has vanished, while it is idle or
    waits for a reply. It is a socket factory of :class:`aiohttp.TCPConnector`.

    Args:
        address: family, type, protocol, canonical name and address, as of getaddrinfo.
    """
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in PROBES.items():
        _set(made, option, value)
    return made


def reading_peer_socket(address: tuple[Any, ...]) -> socket.socket:
    """Return a socket as :func:`watched_socket` does. Its connection also breaks if the peer does not take what was
    sent for UNREAD_MILLISECONDS, so the peer must read while it works."""
    made = watched_socket(address)
    _set(made, "TCP_USER_TIMEOUT", UNREAD_MILLISECONDS)
    return made


def _set(made: socket.socket, option: str, value: int) -> None:
    if hasattr(socket, option):  # not on every system
        made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
