"""Weight groups: the trainer's rank 0 and the workers of one engine, connected by gloo or NCCL.

The sender listens (:class:`rljob.transfer.rendezvous.RendezvousListener`) and calls :meth:`WeightGroup.host`; the
workers call :meth:`WeightGroup.join`. The members of a group that either method returns know its nonce, and its sender
no longer listens. Invariant: every operation has a deadline. A communicator that failed may still wait for a dead peer,
so it is aborted in a daemon thread that is never joined.

Called by ``rljob.trainer.weight_sender`` and, through :mod:`rljob.transfer.receiver`, by the engine's workers.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist

from rljob.transfer.exchange import ExchangeStore
from rljob.transfer.membership import prove_membership
from rljob.transfer.rendezvous import SENDER_RANK, Rendezvous, RendezvousListener, connect

Communicator: TypeAlias = "dist.ProcessGroupGloo | dist.ProcessGroupNCCL"

TRANSPORTS = ("gloo", "nccl")
POLL_SECONDS = 0.001
PROOF_SECONDS = 10.0
"""Time limit of the members' proof with gloo, whose members are connected then: one does not answer only if another
process took its place. The proof is the first operation of NCCL, which connects the members; it has all the time."""
IMPOSTOR = "not all members of the weight group know its nonce: another process may have taken the place of one"
_aborted_nccl: list[object] = []  # kept, because the destructor might wait for a dead peer


class WeightGroup:
    """This process's membership of a weight group. Made by :meth:`join`.

    Attributes:
        rank: of this member; 0 is the sender.
        size: number of members.
        device: where tensors to broadcast must be.
    """

    def __init__(self, communicator: Communicator, store: ExchangeStore, device: str) -> None:
        self.rank = communicator.rank()
        self.size = communicator.size()
        self.device = device
        self._communicator: Communicator | None = communicator
        self._store = store  # the communicator calls its methods

    @classmethod
    def host(
        cls, listener: RendezvousListener, transport: str, timeout_seconds: float, device: str = "cuda"
    ) -> WeightGroup:
        """Form the group as its sender, with all workers. The port is closed when this returns or raises.

        Args:
            listener: of the group.
            transport: gloo or nccl.
            timeout_seconds: of forming the group.
            device: the GPU to use with nccl.

        Raises:
            RuntimeError: the workers did not join in time, or another process took the place of one.
        """
        deadline = time.monotonic() + timeout_seconds
        try:
            workers = listener.accept_members(deadline)
            return cls._form(listener.rendezvous, SENDER_RANK, workers, transport, deadline, device)
        finally:
            listener.close()

    @classmethod
    def join(
        cls, rendezvous: Rendezvous, rank: int, transport: str, timeout_seconds: float, device: str = "cuda"
    ) -> WeightGroup:
        """Join as a worker.

        Args:
            rendezvous: of the group.
            rank: at least 1.
            transport: gloo or nccl.
            timeout_seconds: of joining.
            device: the GPU to use with nccl.

        Raises:
            RuntimeError: the other members did not join in time, or another process took the place of one.
        """
        deadline = time.monotonic() + timeout_seconds
        connection = connect(rendezvous, rank, deadline)
        return cls._form(rendezvous, rank, {SENDER_RANK: connection}, transport, deadline, device)

    @classmethod
    def _form(
        cls,
        rendezvous: Rendezvous,
        rank: int,
        connections: Mapping[int, socket.socket],
        transport: str,
        deadline: float,
        device: str,
    ) -> WeightGroup:
        store = ExchangeStore(connections, deadline)
        try:
            if transport == "nccl":
                group = cls(_nccl(store, rank, rendezvous), store, device)
            else:
                group = cls(_gloo(store, rank, rendezvous, deadline), store, "cpu")
                deadline = min(deadline, time.monotonic() + PROOF_SECONDS)
            try:
                prove_membership(group, rendezvous.group, deadline)
            except BaseException as error:  # re-raised; the communicator must be aborted after a cancellation too
                group.abandon()
                if isinstance(error, RuntimeError):
                    raise RuntimeError(f"{IMPOSTOR} ({error})") from error
                raise
        finally:
            store.close()
        return group

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
            _aborted_nccl.append((communicator, self._store))
        references = [communicator]
        del communicator

        def abort() -> None:
            references.pop().abort()  # drops the last reference to a gloo communicator: closes its sockets and threads

        threading.Thread(target=abort, daemon=True, name="abort-weight-group").start()


def _gloo(store: ExchangeStore, rank: int, rendezvous: Rendezvous, deadline: float) -> dist.ProcessGroupGloo:
    """Return a communicator that is connected to all members."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in the stub
    options._timeout = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address_towards(rendezvous.address))]
    return dist.ProcessGroupGloo(store, rank, rendezvous.world_size, options)


def _nccl(store: ExchangeStore, rank: int, rendezvous: Rendezvous) -> dist.ProcessGroupNCCL:
    """Return a communicator that connects to the members with its first operation."""
    options = dist.ProcessGroupNCCL.Options()
    # broadcast() has its own deadline; a timeout of the watchdog would end the process.
    options._timeout = timedelta(days=365)
    return dist.ProcessGroupNCCL(store, rank, rendezvous.world_size, options)


def address_towards(host: str) -> str:
    """Return the local address from which this machine reaches ``host``."""
    family = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
