"""Weight groups: the trainer's rank 0 and the workers of one engine, connected by gloo or NCCL.

The sender serves the store in which the members meet (:func:`host_rendezvous`); every member then calls
:meth:`WeightGroup.join`. Invariant: every operation has a deadline. A communicator that failed may still wait for a
dead peer, so it is aborted in a daemon thread that is never joined.

Called by ``rljob.trainer.weight_sender`` and, through :mod:`rljob.transfer.receiver`, by the engine's workers.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist

Communicator: TypeAlias = "dist.ProcessGroupGloo | dist.ProcessGroupNCCL"

TRANSPORTS = ("gloo", "nccl")
SENDER_RANK = 0
POLL_SECONDS = 0.001
_aborted_nccl: list[Communicator] = []  # kept, because the destructor might wait for a dead peer


@dataclass(frozen=True)
class Rendezvous:
    """Rendezvous of the members of a weight group.

    Args:
        group: key prefix in the store, a nonce.
        address: host of the store.
        port: port of the store.
        world_size: number of members: the sender and the engine's workers.
    """

    group: str
    address: str
    port: int
    world_size: int


def host_rendezvous(host: str, world_size: int, timeout_seconds: float) -> tuple[Rendezvous, dist.TCPStore]:
    """Return the rendezvous of a new group and the store that serves it. Does not wait for the other members.

    Args:
        host: address of this process that the other members can reach.
        world_size: of the group.
        timeout_seconds: of the store's operations.
    """
    listener = listen(host)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_seconds),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return Rendezvous(secrets.token_hex(16), host, port, world_size), store


class WeightGroup:
    """This process's membership of a weight group. Made by :meth:`join`.

    Attributes:
        rank: of this member; 0 is the sender.
        size: number of members.
        device: where tensors to broadcast must be.
    """

    def __init__(self, communicator: Communicator, device: str) -> None:
        self.rank = communicator.rank()
        self.size = communicator.size()
        self.device = device
        self._communicator: Communicator | None = communicator

    @classmethod
    def join(
        cls,
        rendezvous: Rendezvous,
        rank: int,
        transport: str,
        timeout_seconds: float,
        device: str = "cuda",
        store: dist.TCPStore | None = None,
    ) -> WeightGroup:
        """Join as ``rank``; gloo waits for the other members.

        Args:
            rendezvous: of the group.
            rank: 0 is the sender.
            transport: gloo or nccl.
            timeout_seconds: of joining.
            device: the GPU to use with nccl.
            store: of the sender, which serves it; None: connect to it.

        Raises:
            RuntimeError: the other members did not join in time.
        """
        timeout = timedelta(seconds=timeout_seconds)
        if store is None:
            address, port = rendezvous.address, rendezvous.port
            store = dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
        prefixed = dist.PrefixStore(rendezvous.group, store)
        if transport == "nccl":
            nccl = dist.ProcessGroupNCCL.Options()
            # broadcast() has its own deadline; a timeout of the watchdog would end the process.
            nccl._timeout = timedelta(days=365)
            return cls(dist.ProcessGroupNCCL(prefixed, rank, rendezvous.world_size, nccl), device)
        gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in the stub
        gloo._timeout = timeout
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address_towards(rendezvous.address))]
        return cls(dist.ProcessGroupGloo(prefixed, rank, rendezvous.world_size, gloo), "cpu")

    def broadcast(self, tensor: torch.Tensor, root: int, deadline: float) -> None:
        """Broadcast ``tensor`` in place from rank ``root``.

        Args:
            tensor: contiguous, on :attr:`device`.
            root: rank of the sending member.
            deadline: by ``time.monotonic()``.

        Raises:
            RuntimeError: a member died, the deadline passed, or this member abandoned the group (from any thread).
        """
        communicator = self._communicator
        if communicator is None:
            raise RuntimeError("the weight group was abandoned")
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise RuntimeError("the weight transfer took too long")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = root, 0, timedelta(seconds=remaining)
        work = communicator.broadcast([tensor], options)  # type: ignore[union-attr]  # not in the stub
        if tensor.device.type == "cpu":
            work.wait(timedelta(seconds=remaining))
            return
        while not work.is_completed():  # a wait for NCCL in the stream would never raise
            if time.monotonic() > deadline:
                raise RuntimeError("the weight transfer took too long")
            time.sleep(POLL_SECONDS)

    def abandon(self) -> None:
        """Abort the communicator and its operations in the background; the group cannot be used again. Non-blocking."""
        communicator, self._communicator = self._communicator, None
        if communicator is None:
            return
        if isinstance(communicator, dist.ProcessGroupNCCL):
            _aborted_nccl.append(communicator)
        references = [communicator]
        del communicator

        def abort() -> None:
            references.pop().abort()  # drops the last reference to a gloo communicator: closes its sockets and threads

        threading.Thread(target=abort, daemon=True, name="abort-weight-group").start()


def listen(host: str) -> socket.socket:
    """Return a listening socket on a free port of ``host``, or of all addresses if this machine does not own ``host``
    (the address of a Service in front of it)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family)
    except OSError:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", 0))


def address_towards(host: str) -> str:
    """Return the local address from which this machine reaches ``host``."""
    family = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
