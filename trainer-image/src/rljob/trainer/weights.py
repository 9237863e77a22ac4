"""Sends weights to engines: one group per engine, so that a death touches one engine only.

The wire format and the digest are those of :mod:`rljob.protocol.weights`. The trainer's rank 0 owns one
:class:`WeightSender`; whoever sends to several engines calls :meth:`WeightSender.send` from one thread for each.

Nothing here waits for ever: every operation has what is left of ``timeout_seconds``. A communicator that failed may
still hold a thread that waits for a dead peer, so it is ended in a thread of its own that nobody joins.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeAlias

import blake3
import torch
import torch.distributed as dist

from rljob.protocol.messages import ParameterMeta
from rljob.protocol.weights import DIGEST_BYTES, DTYPE_BYTES, plan_buckets

log = logging.getLogger(__name__)

NamedTensors: TypeAlias = Iterable[tuple[str, torch.Tensor]]
Group: TypeAlias = "dist.ProcessGroupGloo | dist.ProcessGroupNCCL"

WORLD_SIZE = 2  # the sender and the one worker of an engine
POLL_SECONDS = 0.001
_abandoned: list[Group] = []  # NCCL's, which are never destroyed: that might wait for a dead peer


class WeightTransferError(Exception):
    """Weights did not reach an engine; its group is gone."""


@dataclass(frozen=True)
class WeightGroup:
    """What an engine needs to join."""

    group: str
    address: str
    port: int
    world_size: int


@dataclass(eq=False)
class _Opened:
    info: WeightGroup
    store: dist.TCPStore
    communicator: Group | None = None
    used: float = field(default_factory=time.monotonic)
    sending: threading.Lock = field(default_factory=threading.Lock)


class WeightSender:
    """Groups to engines, opened on demand and kept from one update to the next.

    Args:
        host: address of this process that engines can reach.
        bucket_bytes: size of one broadcast.
        timeout_seconds: bound of one :meth:`send`, the engine's joining included.
        transport: gloo or nccl.
    """

    def __init__(self, host: str, bucket_bytes: int, timeout_seconds: float, transport: str) -> None:
        if transport not in ("gloo", "nccl"):
            raise ValueError(f"there is no weight transport {transport!r}; use gloo or nccl")
        self._host = host
        self._bucket_bytes = bucket_bytes
        self._timeout = timeout_seconds
        self._transport = transport
        self._opened: dict[str, _Opened] = {}
        self._lock = threading.Lock()

    def open(self, engine: str, fresh: bool) -> WeightGroup:
        """Return the engine's group; a new one when there is none, or ``fresh``. Returns at once: the engine joins
        while :meth:`send` waits for it."""
        with self._lock:
            opened = self._opened.get(engine)
            if opened is not None and not fresh:
                opened.used = time.monotonic()
                return opened.info
            if opened is not None:
                self._forget(engine, opened)
            listener = _listen(self._host)
            port = listener.getsockname()[1]
            store = dist.TCPStore(
                self._host,
                port,
                is_master=True,
                timeout=timedelta(seconds=self._timeout),
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
            info = WeightGroup(secrets.token_hex(16), self._host, port, WORLD_SIZE)
            self._opened[engine] = _Opened(info, store)
            return info

    def send(self, engine: str, named_tensors: NamedTensors) -> str:
        """Send all tensors to ``engine`` and return their digest, blake3 hex.

        Blocks until the engine has joined and loaded everything.

        Raises:
            WeightTransferError: no group is open, or the engine did not take part in time, died, or received other
                bytes. The group is dropped; open a new one to try again.
        """
        with self._lock:
            opened = self._opened.get(engine)
        if opened is None:
            raise WeightTransferError(f"no weight group is open to engine {engine}; open one first")
        tensors = list(named_tensors)
        with opened.sending:
            try:
                return self._send(opened, tensors, time.monotonic() + self._timeout)
            except (RuntimeError, ValueError, OSError) as error:
                with self._lock:
                    if self._opened.get(engine) is opened:
                        self._forget(engine, opened)
                reason = str(error).partition("\n")[0]
                raise WeightTransferError(f"engine {engine} did not receive the weights: {reason}") from error

    def close(self, engine: str) -> None:
        """Forget the engine's group, if any. A send under way in it fails, by its deadline at the latest."""
        with self._lock:
            opened = self._opened.get(engine)
            if opened is not None:
                self._forget(engine, opened)

    def close_idle(self, seconds: float) -> None:
        """Forget groups that were not asked for in the last ``seconds``: their engines are gone, or will be given new
        groups. Each holds sockets and threads."""
        oldest = time.monotonic() - seconds
        with self._lock:
            for engine, opened in list(self._opened.items()):
                if opened.used < oldest and not opened.sending.locked():
                    self._forget(engine, opened)

    def _send(self, opened: _Opened, tensors: Sequence[tuple[str, torch.Tensor]], deadline: float) -> str:
        if opened.communicator is None:
            opened.communicator = self._join(opened)
        communicator, digest = opened.communicator, blake3.blake3()
        for bucket in plan_buckets(describe(tensors), self._bucket_bytes):
            packed = torch.cat([_bytes_of(tensors[i][1]) for i in bucket]).to(self._device)
            digest.update(_hashable(packed))
            _broadcast(communicator, packed, 0, deadline)
        for rank in range(1, opened.info.world_size):
            receipt = torch.zeros(DIGEST_BYTES, dtype=torch.uint8, device=self._device)
            _broadcast(communicator, receipt, rank, deadline)
            if bytes(receipt.cpu().numpy()) != digest.digest():
                raise ValueError("its digest differs from that of the bytes sent")
        return digest.hexdigest()

    @property
    def _device(self) -> str:
        return "cuda" if self._transport == "nccl" else "cpu"

    def _join(self, opened: _Opened) -> Group:
        timeout = timedelta(seconds=self._timeout)
        store = dist.PrefixStore(opened.info.group, opened.store)
        if self._transport == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(days=365)  # deadlines are ours: the watchdog's would end the process
            return dist.ProcessGroupNCCL(store, 0, opened.info.world_size, options)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in the stub
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(self._host))]
        return dist.ProcessGroupGloo(store, 0, opened.info.world_size, options)

    def _forget(self, engine: str, opened: _Opened) -> None:
        del self._opened[engine]
        if opened.communicator is not None:
            _abandon(opened.communicator)


def describe(named_tensors: NamedTensors) -> list[ParameterMeta]:
    """Return the metadata of the tensors, in their order.

    Raises:
        ValueError: a tensor's type cannot travel.
    """
    metas = []
    for name, tensor in named_tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"parameter {name} is {dtype}; weights travel as {', '.join(DTYPE_BYTES)}")
        metas.append(ParameterMeta(name, dtype, list(tensor.shape)))
    return metas


def digest(named_tensors: NamedTensors) -> str:
    """Return the digest that sending these tensors would give, blake3 hex."""
    hasher = blake3.blake3()
    for _, tensor in named_tensors:
        hasher.update(_hashable(_bytes_of(tensor)))
    return hasher.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _hashable(packed: torch.Tensor) -> memoryview:
    return packed.cpu().numpy().data


def _broadcast(communicator: Group, tensor: torch.Tensor, root: int, deadline: float) -> None:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise ValueError("it took too long")
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = root, 0, timedelta(seconds=remaining)
    work = communicator.broadcast([tensor], options)  # type: ignore[union-attr]  # not in the stub
    if tensor.device.type == "cpu":
        work.wait(timedelta(seconds=remaining))
        return
    while not work.is_completed():  # waiting for NCCL in the stream would never raise
        if time.monotonic() > deadline:
            raise ValueError("it took too long")
        time.sleep(POLL_SECONDS)


def _abandon(communicator: Group) -> None:
    if isinstance(communicator, dist.ProcessGroupNCCL):
        _abandoned.append(communicator)
    doomed = [communicator]
    del communicator

    def end() -> None:
        doomed.pop().abort()  # and with the last reference to it its sockets and threads are gone

    threading.Thread(target=end, daemon=True, name="abort-weight-group").start()


def _listen(host: str) -> socket.socket:
    """Return a listening socket on a free port of ``host``, or of all addresses when ``host`` is not this machine's
    own (a service in front of it)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family)
    except OSError:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", 0))


def _own_address(host: str) -> str:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
