"""Rendezvous of a weight group: the sender listens until every member has connected and proved to know the nonce.

Any process that reaches the port may connect. It learns nothing there, and it does not keep members away: the sender
reads from all connections at the same time, each with a time limit, and when there are too many it drops random ones.
A member whose connection is dropped before it is accepted connects again.
"""

from __future__ import annotations

import contextlib
import logging
import random
import secrets
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field

from rljob.transfer.handshake import SenderHandshake, member_handshake

log = logging.getLogger(__name__)

SENDER_RANK = 0
HANDSHAKE_SECONDS = 10.0
MAX_HANDSHAKES = 64
"""Number of connections that are not authenticated yet."""
BACKLOG = 4096
RETRY_SECONDS = 0.02
ABANDONED = "the weight group was abandoned"


@dataclass(frozen=True)
class Rendezvous:
    """Rendezvous of the members of a weight group.

    Args:
        group: the nonce; who knows it may join.
        address: host on which the sender listens.
        port: port on which the sender listens.
        world_size: number of members: the sender and the engine's workers.
    """

    group: str = field(repr=False)
    address: str
    port: int
    world_size: int


class RendezvousListener:
    """The sender's end: listens for the members of one new group.

    Args:
        host: address of this process that the other members can reach.
        world_size: of the group.

    Attributes:
        rendezvous: what the other members need to join.
    """

    def __init__(self, host: str, world_size: int) -> None:
        self._listener = listen(host)
        self._listener.setblocking(False)
        self._members: dict[int, socket.socket] = {}
        self._pending: dict[socket.socket, tuple[SenderHandshake, float]] = {}
        self._refused = 0  # connections
        self._closed = False
        self._accepting = threading.Lock()
        self.rendezvous = Rendezvous(secrets.token_hex(16), host, self._listener.getsockname()[1], world_size)

    def accept_members(self, deadline: float) -> dict[int, socket.socket]:
        """Return the connections of all workers by rank. The port is closed when this returns or raises.

        Args:
            deadline: by ``time.monotonic()``.

        Raises:
            RuntimeError: not all workers joined in time, or :meth:`close` was called.
        """
        with self._accepting, selectors.DefaultSelector() as selector:
            try:
                selector.register(self._listener, selectors.EVENT_READ)
                while len(self._members) < self.rendezvous.world_size - 1:
                    self._wait(selector, deadline)
                if self._closed:
                    raise RuntimeError(ABANDONED)
            except BaseException as error:  # re-raised; the connections must be closed after any error
                shut(*self._members.values())
                if isinstance(error, (OSError, ValueError)):  # close() shut the listener down
                    raise RuntimeError(ABANDONED) from error
                raise
            finally:
                shut(self._listener, *self._pending)
                self._pending.clear()
        if self._refused:
            port = self.rendezvous.port
            log.warning("%d connections to the weight group at port %d were refused", self._refused, port)
        return self._members

    def close(self) -> None:
        """Close the port and the connections. Idempotent; from any thread: accept_members() then raises, and so does
        the owner of the connections."""
        self._closed = True
        for connection in (self._listener, *list(self._members.values())):
            _end(connection)
        if self._accepting.acquire(blocking=False):  # otherwise accept_members() closes it
            self._listener.close()
            self._accepting.release()

    def _wait(self, selector: selectors.BaseSelector, deadline: float) -> None:
        """Wait for the next event and handle it."""
        now = time.monotonic()
        if now >= deadline:
            joined, wanted = len(self._members), self.rendezvous.world_size - 1
            refused = f"; {self._refused} other connections were refused" if self._refused else ""
            raise RuntimeError(f"{joined} of {wanted} workers of the engine joined the weight group in time{refused}")
        for connection in [each for each, (_, end) in self._pending.items() if end <= now]:
            self._drop(selector, connection)
        ends = [end for _, end in self._pending.values()]
        for key, _ in selector.select(min([deadline, *ends]) - now):
            if key.fileobj is self._listener:
                self._accept(selector)
            elif key.fileobj in self._pending:  # not dropped for a newer connection
                self._advance(selector, key.fileobj)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the peer has gone
            return
        except OSError:  # no file descriptor is left, or close() shut the listener down
            if not self._pending:
                raise
            self._drop(selector, random.choice(list(self._pending)))
            return
        if len(self._pending) >= MAX_HANDSHAKES:
            # A random one: a flood would push a member out for certain if the oldest or the newest were dropped.
            self._drop(selector, random.choice(list(self._pending)))
        with contextlib.suppress(OSError):  # the peer has gone; reading will tell
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        handshake = SenderHandshake(connection, self.rendezvous.group)
        self._pending[connection] = handshake, time.monotonic() + HANDSHAKE_SECONDS
        selector.register(connection, selectors.EVENT_READ)

    def _advance(self, selector: selectors.BaseSelector, connection: socket.socket) -> None:
        handshake, _ = self._pending[connection]
        try:
            if not handshake.advance():
                return
            if not 0 < handshake.rank < self.rendezvous.world_size or handshake.rank in self._members:
                raise ConnectionRefusedError(f"a second member with rank {handshake.rank}")
            handshake.accept()
        except BlockingIOError:
            return
        except OSError as error:
            log.debug("a connection to the weight group was refused: %s", error)
            self._drop(selector, connection)
            return
        selector.unregister(connection)
        del self._pending[connection]
        self._members[handshake.rank] = connection

    def _drop(self, selector: selectors.BaseSelector, connection: socket.socket) -> None:
        self._refused += 1
        selector.unregister(connection)
        del self._pending[connection]
        connection.close()


def connect(rendezvous: Rendezvous, rank: int, deadline: float) -> socket.socket:
    """Return an authenticated connection of the worker ``rank`` to the sender.

    Args:
        rendezvous: of the group.
        rank: of this worker, at least 1.
        deadline: by ``time.monotonic()``.

    Raises:
        RuntimeError: the sender no longer listens, does not answer in time, or does not know the nonce.
    """
    where = f"the sender at {rendezvous.address} port {rendezvous.port}"
    problem: OSError = TimeoutError("no time left")
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            connection = socket.create_connection((rendezvous.address, rendezvous.port), remaining)
        except OSError as error:
            raise RuntimeError(f"{where} cannot be reached: {error}") from error
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            member_handshake(connection, rendezvous.group, rank, deadline)
        except PermissionError as error:
            connection.close()
            raise RuntimeError(f"{where} is not the trainer: {error}") from error
        except OSError as error:  # dropped during a flood of connections, or refused
            connection.close()
            problem = error
            time.sleep(RETRY_SECONDS)
        else:
            return connection
    raise RuntimeError(f"{where} did not accept rank {rank} in time: {problem}")


def listen(host: str) -> socket.socket:
    """Return a listening socket on a free port of ``host``, or of all addresses if this machine does not own ``host``
    (the address of a Service in front of it)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family, backlog=BACKLOG)
    except OSError:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
        return socket.create_server(("", 0), backlog=BACKLOG)


def shut(*connections: socket.socket) -> None:
    """End connections and listeners, and close them."""
    for connection in connections:
        _end(connection)
        connection.close()


def _end(connection: socket.socket) -> None:
    """End a connection or a listener: for threads that wait for it too, and for forks of this process."""
    with contextlib.suppress(OSError):  # closed already
        connection.shutdown(socket.SHUT_RDWR)
