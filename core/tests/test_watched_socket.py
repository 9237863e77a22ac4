from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from rljob.protocol.watched_socket import reading_peer_socket, watched_socket


@pytest.mark.parametrize(("make", "unread"), [(watched_socket, 0), (reading_peer_socket, 10_000)])
def test_a_socket_probes_its_peer_within_seconds(make: Callable[[Any], socket.socket], unread: int) -> None:
    with make((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 1))) as made:
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert [made.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [2, 1, 3, unread]
