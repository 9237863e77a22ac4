"""One round of weights in a weight group, by the wire format of :mod:`rljob.protocol.weights`: both ends.

While the receiver loads a bucket, the next ones arrive in a thread. Over gloo two buckets are on the wire at a time, so
that it never waits for Python.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Protocol, TypeAlias

import torch

from rljob.transfer.bucket_buffers import BucketBuffers
from rljob.transfer.bucket_wires import BucketWire, Members, Wait, wait_one_behind
from rljob.transfer.checksum import Checksum
from rljob.transfer.membership import Member
from rljob.transfer.packed_weights import PackedWeights
from rljob.transfer.rendezvous import SENDER_RANK
from rljob.transfer.wire_plan import PackedTensor, WirePlan

LoadWeights: TypeAlias = Callable[[list[tuple[str, torch.Tensor]]], object]
"""Loads some tensors into the model. They are views of a buffer that is not reused as long as a tensor refers to it."""
AHEAD = 2
"""Buckets that may arrive while an earlier one is loaded; each takes memory."""
KEPT_BUCKETS = AHEAD + 2
"""Buffers that a receiver keeps: for the buckets that arrive, the one that is loaded, and one before it of which an
engine still holds some tensors, because the others of the same layer are in the next bucket."""


class WiredMember(Member, Members, Protocol):
    """A member of a weight group."""

    wire: BucketWire


def send_round(group: WiredMember, weights: PackedWeights, deadline: float) -> str:
    """Send all tensors and return their digest, hex, once every worker has received them.

    Raises:
        RuntimeError: a worker died, or the deadline (``time.monotonic()``) passed, also while the weights are gathered.
        ValueError: a worker received other bytes.
    """
    with group.wire.sending(group):
        numbers = range(len(weights.plan.buckets))
        wait_one_behind(group.wire.begin_send(group, weights.bucket(i, deadline), deadline) for i in numbers)
        own = bytes.fromhex(weights.digest())
        receipts = _exchange_digests(group, own, deadline)
    for rank, receipt in enumerate(receipts):
        if receipt != own:
            raise ValueError(f"its worker of rank {rank} received other bytes than were sent")
    return own.hex()


def receive_round(
    group: WiredMember,
    plan: WirePlan,
    load: LoadWeights,
    deadline: float,
    buffers: BucketBuffers | None = None,
) -> str:
    """Receive all tensors, load them bucket by bucket and return their digest, hex.

    Args:
        group: joined.
        plan: the same as at the sender.
        load: see LoadWeights.
        deadline: by ``time.monotonic()``.
        buffers: those of the round before. Not used on a GPU, where torch itself keeps memory.

    Raises:
        RuntimeError: a member died, or the deadline (``time.monotonic()``) passed.
        ValueError: the received bytes are not those that were sent, here or at another worker. They are loaded, but
            must not be used.
    """
    checksum, buffers = Checksum(), buffers or BucketBuffers(KEPT_BUCKETS)
    stream = torch.cuda.current_stream(group.device) if group.device.startswith("cuda") else None

    def receive(size: int) -> tuple[torch.Tensor, Wait]:
        with nullcontext() if stream is None else torch.cuda.stream(stream):  # of load(): it orders the reuse of memory
            packed = torch.empty(size, dtype=torch.uint8, device=group.device) if stream else buffers.take(size)
            return packed, group.wire.begin_receive(group, packed, deadline)

    wire = ThreadPoolExecutor(1, "receive-weights")
    try:
        arriving = deque(wire.submit(receive, size) for size in plan.sizes[:AHEAD])
        for i, pieces in enumerate(plan.buckets):
            packed, wait = arriving.popleft().result()
            wait()
            if i + AHEAD < len(plan.sizes):
                arriving.append(wire.submit(receive, plan.sizes[i + AHEAD]))
            _load(packed, pieces, checksum, load)
    finally:
        wire.shutdown(wait=False, cancel_futures=True)
    own = checksum.hexdigest()
    digests = [digest.hex() for digest in _exchange_digests(group, bytes.fromhex(own), deadline)]
    sent = digests[SENDER_RANK]
    if sent != own:
        raise ValueError(f"weights with digest {own} were received, but {sent} were sent")
    for rank, digest in enumerate(digests):
        if digest != sent:  # no worker commits what another one refuses
            raise ValueError(f"the worker of rank {rank} received other bytes than were sent")
    return own


def _load(packed: torch.Tensor, pieces: Sequence[PackedTensor], checksum: Checksum, load: LoadWeights) -> None:
    for piece in pieces:
        checksum.update(piece.bytes_of(packed))  # before load(), which may change it
    load([(piece.meta.name, piece.tensor_of(packed)) for piece in pieces])


def _exchange_digests(group: Member, own: bytes, deadline: float) -> list[bytes]:
    """Return the digest of each rank; ``own`` is that of this member."""
    digests = []
    for rank in range(group.size):
        message = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(group.device)
        group.broadcast(message, rank, deadline)
        digests.append(bytes(message.cpu().numpy()))
    return digests
