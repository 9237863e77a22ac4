"""The store in which the members of a weight group exchange what their communicator needs, over authenticated
connections.

gloo exchanges one address per member, NCCL the sender's unique id: every value is set once, by one member, and read by
the others. So every member holds all values, and the sender forwards the values of each worker to the others.
Connections are read while a member waits for a value, thus by the thread that creates the communicator.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from rljob.transfer.rendezvous import shut

MAX_BYTES = 1 << 20
"""Limit of all keys and values of a store. gloo needs about 60 bytes per pair of members."""
_HEADER = struct.Struct("!HI")


class ExchangeStore(dist.Store):
    """One member's store. torch calls it from C++, so its creator must hold a reference as long as the communicator.

    Args:
        connections: authenticated, by the rank of the peer: at the sender those of all workers, at a worker the one to
            the sender. Owned by the store.
        deadline: of all operations, by ``time.monotonic()``.
    """

    def __init__(self, connections: Mapping[int, socket.socket], deadline: float) -> None:
        super().__init__()
        self.own_values: list[bytes] = []
        """Those that this member has set."""
        self._connections = dict(connections)
        self._unread = dict.fromkeys(connections, b"")
        self._deadline = deadline
        self._values: dict[str, bytes] = {}
        self._size = 0
        self._lock = threading.RLock()
        for connection in connections.values():
            connection.setblocking(False)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value at all members."""
        raw = value.encode() if isinstance(value, str) else value
        with self._lock:
            self._keep(key, raw)
            self.own_values.append(raw)
            self._send(_HEADER.pack(len(key.encode()), len(raw)) + key.encode() + raw, *self._connections)

    def get(self, key: str) -> bytes:
        """Return a value once a member has set it."""
        self.wait([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until members have set all ``keys``.

        Raises:
            RuntimeError: a member left, or sent something else, or the time is over.
        """
        end = self._deadline
        if timeout is not None:
            end = min(end, time.monotonic() + timeout.total_seconds())
        with self._lock:
            while not self.check(keys):
                self._read(end)

    def check(self, keys: list[str]) -> bool:
        """Return whether all ``keys`` are here."""
        return all(key in self._values for key in keys)

    def has_extended_api(self) -> bool:
        """Return False: torch then uses the methods above only."""
        return False

    def close(self) -> None:
        """Close the connections. Values that are set later stay here; waiting for a value raises. Idempotent."""
        with self._lock:
            shut(*self._connections.values())
            self._connections.clear()

    def _keep(self, key: str, value: bytes) -> None:
        self._size += len(key) + len(value)
        if self._size > MAX_BYTES:
            raise RuntimeError(f"the members of a weight group exchanged more than {MAX_BYTES} bytes")
        self._values[key] = value

    def _send(self, frame: bytes, *ranks: int) -> None:
        for rank in ranks:
            try:
                sent = self._connections[rank].send(frame)
            except OSError as error:
                raise RuntimeError(f"rank {rank} left the weight group while it formed") from error
            if sent < len(frame):
                raise RuntimeError(f"rank {rank} does not read what the members of the weight group exchange")

    def _read(self, end: float) -> None:
        """Wait for data of any connection, and keep and forward the values that are complete."""
        remaining = end - time.monotonic()
        if remaining <= 0 or not self._connections:
            raise RuntimeError("the members of the weight group did not connect in time")
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            ready: list[int] = [key.data for key, _ in selector.select(remaining)]
        for rank in ready:
            try:
                data = self._connections[rank].recv(1 << 16)
            except OSError as error:
                raise RuntimeError(f"rank {rank} left the weight group while it formed") from error
            if not data:
                raise RuntimeError(f"rank {rank} left the weight group while it formed")
            self._unread[rank] += data
            self._handle(rank, [other for other in self._connections if other != rank])

    def _handle(self, rank: int, others: Sequence[int]) -> None:
        while len(unread := self._unread[rank]) >= _HEADER.size:
            key_size, value_size = _HEADER.unpack_from(unread)
            size = _HEADER.size + key_size + value_size
            if size > MAX_BYTES:
                raise RuntimeError(f"rank {rank} sent {size} bytes to the members of the weight group; too many")
            if len(unread) < size:
                return
            frame, self._unread[rank] = unread[:size], unread[size:]
            key = frame[_HEADER.size : _HEADER.size + key_size].decode(errors="replace")
            self._keep(key, frame[_HEADER.size + key_size :])
            self._send(frame, *others)
