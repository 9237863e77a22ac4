"""Chooses ports for servers that another process binds later."""

from __future__ import annotations

import random
import socket

LOWEST, HIGHEST = 10_240, 29_999
"""Below the ephemeral ports of the kernel, which a connection of any process may take before the server binds its port,
and below the node ports of Kubernetes."""


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port that no socket of ``address`` uses now."""
    while True:
        port = random.SystemRandom().randint(LOWEST, HIGHEST)
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
