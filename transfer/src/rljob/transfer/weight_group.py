"""Weight groups: the trainer's rank 0 and the workers of one engine, connected by gloo or NCCL. With ipc gloo connects
them, and only the buckets do not cross its connections (:mod:`rljob.transfer.bucket_wires`).

The sender listens (:class:`rljob.transfer.rendezvous.RendezvousListener`) and calls :meth:`WeightGroup.host`; the
workers call :meth:`WeightGroup.join`. The members of a group that either method returns know its nonce, its sender no
longer listens, and gloo accepts no further connection. Invariants: every operation has a deadline, and the death of a
member never ends the process of another. The creation of a communicator, and its abort, may wait for a dead peer
without end, so both run in daemon threads that are never joined and hold no weights.

Called by ``rljob.trainer.weight_sender`` and, through :mod:`rljob.transfer.receiver`, by the engine's workers.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist

from rljob.transfer.bucket_wires import WIRES, BucketWire, PlainWire, prove_one_machine
from rljob.transfer.exchange import ExchangeStore
from rljob.transfer.gloo_listener import drop_new_connections, raise_descriptor_limit
from rljob.transfer.membership import prove_membership
from rljob.transfer.rendezvous import SENDER_RANK, Rendezvous, RendezvousListener, connect

Communicator: TypeAlias = "dist.ProcessGroupGloo | dist.ProcessGroupNCCL"

POLL_SECONDS = 0.001
PROOF_SECONDS = 10.0
"""Time limit of the members' proof with gloo, whose members are connected then: one does not answer only if another
process took its place. The proof is the first operation of NCCL, which connects the members; it has all the time."""
NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # the watchdog would end the process after the error of a peer
    "TORCH_NCCL_DESYNC_DEBUG": "0",  # would change the value above to 3
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # the monitor would end the process if an abort hangs
}
"""Read by the constructor of ProcessGroupNCCL. A weight group reports errors as exceptions of its own operations."""
IMPOSTOR = "not all members of the weight group know its nonce: another process may have taken the place of one"
_environment = threading.Lock()
_aborted_nccl: list[object] = []  # kept, because the destructor might wait for a dead peer


class WeightGroup:
    """This process's membership of a weight group. Made by :meth:`host` or :meth:`join`.

    Attributes:
        rank: of this member; 0 is the sender.
        size: number of members.
        device: where tensors to broadcast must be.
        wire: of the buckets.
    """

    def __init__(
        self, communicator: Communicator, store: ExchangeStore, device: str, wire: BucketWire | None = None
    ) -> None:
        self.rank = communicator.rank()
        self.size = communicator.size()
        self.device = device
        self.wire = wire or PlainWire()
        self._communicator: Communicator | None = communicator
        self._store = store  # the communicator calls its methods

    @classmethod
    def host(
        cls, listener: RendezvousListener, transport: str, timeout_seconds: float, device: str = "cuda"
    ) -> WeightGroup:
        """Form the group as its sender, with all workers. The port is closed when this returns or raises.

        Args:
            listener: of the group.
            transport: gloo, nccl or ipc.
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
            transport: gloo, nccl or ipc.
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
        created: list[WeightGroup] = []

        def form() -> WeightGroup:
            try:
                wire = WIRES[transport]()
                if transport == "nccl":
                    group, end = cls(_nccl(store, rank, rendezvous), store, device, wire), deadline
                else:
                    group = cls(_gloo(store, rank, rendezvous, deadline), store, "cpu", wire)
                    end = min(deadline, time.monotonic() + PROOF_SECONDS)
                created.append(group)
                group._prove(rendezvous.group, end)
                if transport != "nccl":  # earlier, a member whose place was taken would wait for its connection
                    drop_new_connections(store.own_values)
                if transport == "ipc":
                    prove_one_machine(group, rank, group.size, deadline)
            except BaseException:  # re-raised; the other members fail at once when this one leaves
                for group in created:
                    group.abandon()
                raise
            finally:
                store.close()
            return group

        try:
            return _call_until(deadline, form)
        except BaseException:  # re-raised; the communicator must be aborted after a cancellation too
            for group in created:
                group.abandon()
            store.close()
            raise

    def _prove(self, nonce: str, deadline: float) -> None:
        try:
            prove_membership(self, nonce, deadline)
        except RuntimeError as error:
            raise RuntimeError(f"{IMPOSTOR} ({error})") from error

    def broadcast(self, tensor: torch.Tensor, root: int, deadline: float) -> None:
        """Broadcast ``tensor`` in place from rank ``root``; see :meth:`begin_broadcast`."""
        self.begin_broadcast(tensor, root, deadline)()

    def begin_broadcast(self, tensor: torch.Tensor, root: int, deadline: float) -> Callable[[], None]:
        """Begin to broadcast ``tensor`` in place from rank ``root``; return a function that waits for the end.

        Args:
            tensor: contiguous, on :attr:`device`.
            root: rank of the sending member.
            deadline: by ``time.monotonic()``.

        Raises:
            RuntimeError: a member died, the deadline passed, or this member abandoned the group (from any thread).
                The function raises it too.
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
            return lambda: work.wait(timedelta(seconds=remaining))
        return lambda: _wait_for_nccl(work, deadline)

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


def _wait_for_nccl(work: dist.Work, deadline: float) -> None:
    while not work.is_completed():  # a wait for NCCL in the stream would never raise
        if time.monotonic() > deadline:
            raise RuntimeError("the weight transfer took too long")
        time.sleep(POLL_SECONDS)
    error = work.exception()
    if error is not None:  # is_completed() is true after an error too
        raise RuntimeError(f"a member of the weight group died, or NCCL failed: {error}") from error


def _gloo(store: ExchangeStore, rank: int, rendezvous: Rendezvous, deadline: float) -> dist.ProcessGroupGloo:
    """Return a communicator that is connected to all members."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in the stub
    options._timeout = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
    # A lazy device would connect some pairs later, when its listener drops connections.
    device = dist.ProcessGroupGloo.create_device(hostname=address_towards(rendezvous.address), lazy_init=False)
    options._devices = [device]
    raise_descriptor_limit()
    return dist.ProcessGroupGloo(store, rank, rendezvous.world_size, options)


def _nccl(store: ExchangeStore, rank: int, rendezvous: Rendezvous) -> dist.ProcessGroupNCCL:
    """Return a communicator that connects to the members with its first operation."""
    options = dist.ProcessGroupNCCL.Options()
    # broadcast() has its own deadline; a timeout of the watchdog would end the process.
    options._timeout = timedelta(days=365)
    with _environment_of(NCCL_SETTINGS):
        return dist.ProcessGroupNCCL(store, rank, rendezvous.world_size, options)


@contextlib.contextmanager
def _environment_of(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the duration of a block."""
    with _environment:
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def _call_until(deadline: float, form: Callable[[], WeightGroup]) -> WeightGroup:
    """Return the result of ``form``; a thread calls it, which is left behind if it takes longer.

    Raises:
        RuntimeError: the deadline (``time.monotonic()``) passed. A group that forms later is abandoned.
    """
    outcome: Future[WeightGroup] = Future()

    def run() -> None:
        try:
            group = form()
        except BaseException as error:  # noqa: BLE001  raised in the caller's thread
            outcome.set_exception(error)
        else:
            outcome.set_result(group)

    def abandon(late: Future[WeightGroup]) -> None:
        if late.exception() is None:
            late.result().abandon()

    threading.Thread(target=run, daemon=True, name="form-weight-group").start()
    try:
        return outcome.result(max(deadline - time.monotonic(), 0.0))
    except BaseException as error:  # re-raised; a group that forms after a cancellation must be abandoned too
        outcome.add_done_callback(abandon)
        if isinstance(error, TimeoutError):
            raise RuntimeError("the communicator of the weight group was not created in time") from None
        raise


def address_towards(host: str) -> str:
    """Return the local address from which this machine reaches ``host``."""
    family = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
