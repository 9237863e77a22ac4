"""How the bytes of a bucket reach the workers of a group: one wire for each transport.

Deadlines, errors, digests and receipts are those of the group in every case: a wire only moves the bytes between two
of its broadcasts.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeAlias

import torch

from rljob.transfer.bucket_buffers import BucketBuffers, pinned_memory, plain_memory
from rljob.transfer.rendezvous import SENDER_RANK
from rljob.transfer.shared_memory import HANDLE_BYTES, Handle, handle_of, read_shared, shared_memory

STAGE_BYTES = 16 << 20
"""Part of a bucket that a GPU holds while it is sent; two of them for each engine."""
PROOF_BYTES = 32
NOT_HERE = (
    "weightSync.transport: ipc needs the trainer and the engine in processes of one user on one machine, and the "
    "trainer's memory cannot be read here ({}); set auto or gloo"
)


Wait: TypeAlias = Callable[[], None]
"""Waits for the end of an operation, and raises its error."""


class Members(Protocol):
    """The part of a weight group that the wires use."""

    device: str

    def begin_broadcast(self, tensor: torch.Tensor, root: int, deadline: float) -> Wait:
        """Begin what ``broadcast`` does; the result waits for the end."""

    def broadcast(self, tensor: torch.Tensor, root: int, deadline: float) -> None:
        """Broadcast ``tensor`` in place from rank ``root``."""


class BucketWire(Protocol):
    """Moves buckets from the sender of a group to its workers. All errors are RuntimeErrors.

    The results of both methods wait for the end. Another bucket may be begun before: gloo moves it while Python hashes
    and loads. The other wires have moved a bucket when the methods return.
    """

    def begin_send(self, group: Members, bucket: torch.Tensor, deadline: float) -> Wait:
        """Begin to send a bucket: uint8, on the host. It does not change before the end of the round."""

    def begin_receive(self, group: Members, bucket: torch.Tensor, deadline: float) -> Wait:
        """Begin to receive a bucket into memory of its size on the device of the group."""

    def sending(self, group: Members) -> AbstractContextManager[object]:
        """Return a context for everything that the sender does in a round, the digests included."""


class PlainWire:
    """A broadcast of each bucket, for gloo."""

    def sending(self, group: Members) -> AbstractContextManager[object]:
        """See :class:`BucketWire`."""
        return nullcontext()

    def begin_send(self, group: Members, bucket: torch.Tensor, deadline: float) -> Wait:
        """See :class:`BucketWire`."""
        return group.begin_broadcast(bucket, SENDER_RANK, deadline)

    def begin_receive(self, group: Members, bucket: torch.Tensor, deadline: float) -> Wait:
        """See :class:`BucketWire`."""
        return group.begin_broadcast(bucket, SENDER_RANK, deadline)


class StagedWire:
    """Broadcasts of parts of each bucket, for NCCL. The sender copies the next part to its GPU while one is on the
    wire. A round has a stream of its own: it does not wait for kernels of a training step."""

    def __init__(self) -> None:
        self._stages: list[torch.Tensor] = []
        self._stream: torch.cuda.Stream | None = None

    def sending(self, group: Members) -> AbstractContextManager[object]:
        """See :class:`BucketWire`."""
        if group.device.startswith("cuda") and self._stream is None:
            self._stream = torch.cuda.Stream(group.device)
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def begin_send(self, group: Members, bucket: torch.Tensor, deadline: float) -> Wait:
        """See :class:`BucketWire`. Nothing is left to wait for: the next bucket needs the stages."""
        if not self._stages:
            self._stages = [torch.empty(STAGE_BYTES, dtype=torch.uint8, device=group.device) for _ in range(2)]
        wait_one_behind(self._begin_parts(group, bucket, deadline))
        return _nothing

    def _begin_parts(self, group: Members, bucket: torch.Tensor, deadline: float) -> Iterator[Wait]:
        for i, part in enumerate(bucket.split(STAGE_BYTES)):
            stage = self._stages[i % 2][: len(part)]  # its last broadcast, before the one before, has ended
            stage.copy_(part, non_blocking=True)
            yield group.begin_broadcast(stage, SENDER_RANK, deadline)  # after the copy, by the stream

    def begin_receive(self, group: Members, bucket: torch.Tensor, deadline: float) -> Wait:
        """See :class:`BucketWire`."""
        for part in bucket.split(STAGE_BYTES):
            group.broadcast(part, SENDER_RANK, deadline)
        return _nothing


class SharedMemoryWire(PlainWire):
    """Broadcasts of the place of each bucket, for ipc: each worker copies it from the trainer's memory, so an engine
    more is no work for the trainer. The memory is on the host, so it does not matter which GPUs a process can see."""

    def begin_send(self, group: Members, bucket: torch.Tensor, deadline: float) -> Wait:
        """See :class:`BucketWire`. ``bucket`` has memory of :func:`wire_buffers`."""
        message = torch.frombuffer(bytearray(handle_of(bucket).encode()), dtype=torch.uint8)
        group.broadcast(message, SENDER_RANK, deadline)
        return _nothing

    def begin_receive(self, group: Members, bucket: torch.Tensor, deadline: float) -> Wait:
        """See :class:`BucketWire`."""
        message = torch.zeros(HANDLE_BYTES, dtype=torch.uint8)
        group.broadcast(message, SENDER_RANK, deadline)
        try:
            read_shared(Handle.decode(bytes(message.numpy())), bucket)
        except OSError as error:
            raise RuntimeError(NOT_HERE.format(error)) from error
        return _nothing


def wait_one_behind(operations: Iterable[Wait]) -> None:
    """Wait for each operation once the next one has begun. ``operations`` begins them one after the other."""
    before = _nothing
    for wait in operations:
        before()
        before = wait
    before()


def _nothing() -> None:
    """Wait for nothing."""


WIRES: dict[str, type[BucketWire]] = {"gloo": PlainWire, "nccl": StagedWire, "ipc": SharedMemoryWire}
"""Transport → wire."""


def wire_buffers(transport: str, device: torch.device | str) -> BucketBuffers:
    """Return memory for the buckets that a trainer sends. ``device``: of the weights."""
    if transport == "ipc":
        return BucketBuffers(allocate=shared_memory)
    return BucketBuffers(allocate=pinned_memory if torch.device(device).type == "cuda" else plain_memory)


def prove_one_machine(group: Members, rank: int, size: int, deadline: float) -> None:
    """Prove that the workers can read the memory of the sender, when a group has formed.

    Args:
        group: of the transport ipc.
        rank: of this member.
        size: number of members.
        deadline: by ``time.monotonic()``.

    Raises:
        RuntimeError: a worker cannot read it.
    """
    wire, content = SharedMemoryWire(), torch.zeros(PROOF_BYTES, dtype=torch.uint8)
    if rank == SENDER_RANK:
        content = torch.from_numpy(shared_memory(PROOF_BYTES))
        content.copy_(torch.frombuffer(bytearray(secrets.token_bytes(PROOF_BYTES)), dtype=torch.uint8))
        wire.begin_send(group, content, deadline)()
    else:
        wire.begin_receive(group, content, deadline)()
    sent = content.clone()
    group.broadcast(sent, SENDER_RANK, deadline)
    if not sent.equal(content):
        raise RuntimeError(NOT_HERE.format("another process has its number"))
    for worker in range(1, size):  # the sender keeps the memory until all have read it
        group.broadcast(torch.zeros(1), worker, deadline)
