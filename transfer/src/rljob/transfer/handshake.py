"""Handshake of a weight group: both ends of a TCP connection prove that they know the group's nonce, by HMAC-SHA256.

The nonce itself never crosses the connection. It reaches the members through the coordinator, over connections that
need a token. Messages have fixed sizes:

1. member → sender: MAGIC, rank, 32 random bytes;
2. sender → member: 32 random bytes, proof of the sender;
3. member → sender: proof of the member;
4. sender → member: ACCEPTED.

A proof covers the rank and the random bytes of both ends, so a recorded proof is worthless in every other connection.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time

MAGIC = b"rljob weights 1\n"
ACCEPTED = b"\x01"
RANDOM_BYTES = 32
PROOF_BYTES = 32
SHORTEST_SECONDS = 0.001
"""Time limit of a socket when no time is left: 0 would make it non-blocking."""
_HELLO = struct.Struct(f"!{len(MAGIC)}sI{RANDOM_BYTES}s")


def proof(nonce: str, label: str, rank: int, *parts: bytes) -> bytes:
    """Return the HMAC that proves knowledge of ``nonce``.

    Args:
        nonce: of the group.
        label: distinguishes the proofs of a group. ``label`` determines the number and sizes of ``parts``.
        rank: of the member that proves.
        parts: random bytes of both ends.
    """
    return hmac.digest(nonce.encode(), b"\0".join([label.encode(), str(rank).encode(), b"".join(parts)]), "sha256")


class SenderHandshake:
    """The sender's end of one connection, which never blocks.

    Attributes:
        rank: that the member claims; valid once :meth:`advance` has returned True.
    """

    def __init__(self, connection: socket.socket, nonce: str) -> None:
        connection.setblocking(False)
        self.rank = 0
        self._connection = connection
        self._nonce = nonce
        self._random = secrets.token_bytes(RANDOM_BYTES)
        self._expected = b""  # proof of the member; empty before its hello
        self._received = b""

    def advance(self) -> bool:
        """Process what has arrived; return whether the member is authenticated.

        Raises:
            OSError: the connection ended or is no connection of a member.
        """
        wanted = PROOF_BYTES if self._expected else _HELLO.size
        data = self._connection.recv(wanted - len(self._received))
        if not data:
            raise ConnectionAbortedError("the peer closed the connection")
        self._received += data
        if not self._expected and not self._received.startswith(MAGIC[: len(self._received)]):
            raise ConnectionRefusedError("the peer does not speak this protocol")
        if len(self._received) < wanted:
            return False
        message, self._received = self._received, b""
        if self._expected:
            if not hmac.compare_digest(message, self._expected):
                raise ConnectionRefusedError("the peer does not know the nonce")
            return True
        _, self.rank, random = _HELLO.unpack(message)
        self._expected = proof(self._nonce, "member", self.rank, random, self._random)
        _send(self._connection, self._random + proof(self._nonce, "sender", self.rank, random, self._random))
        return False

    def accept(self) -> None:
        """Tell the member that it is accepted.

        Raises:
            OSError: the connection ended.
        """
        _send(self._connection, ACCEPTED)


def member_handshake(connection: socket.socket, nonce: str, rank: int, deadline: float) -> None:
    """Carry out the member's end.

    Args:
        connection: to the sender; blocking.
        nonce: of the group.
        rank: of the member.
        deadline: by ``time.monotonic()``.

    Raises:
        PermissionError: the listening process does not know the nonce.
        OSError: the connection ended, or the deadline passed.
    """
    own = secrets.token_bytes(RANDOM_BYTES)
    connection.sendall(_HELLO.pack(MAGIC, rank, own))
    answer = _receive(connection, RANDOM_BYTES + PROOF_BYTES, deadline)
    random, theirs = answer[:RANDOM_BYTES], answer[RANDOM_BYTES:]
    if not hmac.compare_digest(theirs, proof(nonce, "sender", rank, own, random)):
        raise PermissionError("the process that listens there does not know the nonce of the weight group")
    connection.sendall(proof(nonce, "member", rank, own, random))
    if _receive(connection, len(ACCEPTED), deadline) != ACCEPTED:
        raise ConnectionAbortedError("the sender did not accept the connection")


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        connection.settimeout(max(deadline - time.monotonic(), SHORTEST_SECONDS))
        chunk = connection.recv(size - len(data))
        if not chunk:
            raise ConnectionAbortedError("the sender closed the connection")
        data += chunk
    return data


def _send(connection: socket.socket, message: bytes) -> None:
    if connection.send(message) != len(message):  # a few bytes always fit the buffer of a new connection
        raise ConnectionAbortedError("the peer does not read")
