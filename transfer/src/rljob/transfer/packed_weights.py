"""The weights of one version, packed for the wire: one copy for all engines, and one digest.

Made by the trainer's rank 0 for each update; the sends of the update read it at the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import TypeAlias

import torch

from rljob.api.memory_plan import DTYPE_BYTES
from rljob.protocol.messages import ParameterMeta
from rljob.protocol.weights import parameter_bytes
from rljob.transfer.bucket_buffers import BucketBuffers
from rljob.transfer.checksum import Checksum

NamedTensors: TypeAlias = Iterable[tuple[str, torch.Tensor]]


class PackedWeights:
    """Buckets in wire order; see :mod:`rljob.protocol.weights`. Made by :func:`pack`.

    Args:
        parameters: metadata of the tensors, in wire order.
        buckets: uint8; they must not change.
    """

    def __init__(self, parameters: list[ParameterMeta], buckets: list[torch.Tensor]) -> None:
        self.parameters = parameters
        self.buckets = buckets
        self._digest: Future[str] = Future()
        threading.Thread(target=self._hash, daemon=True, name="hash-weights").start()

    def digest(self) -> str:
        """Return the digest, hex. A thread computes it while the buckets are sent; waits for the thread."""
        return self._digest.result()

    def _hash(self) -> None:
        try:
            checksum, metas = Checksum(), iter(self.parameters)
            for bucket in self.buckets:
                place = 0
                while place < bucket.numel():
                    end = place + parameter_bytes(next(metas))
                    checksum.update(bucket[place:end])
                    place = end
        except Exception as error:  # noqa: BLE001 raised in the threads that wait
            self._digest.set_exception(error)
        else:
            self._digest.set_result(checksum.hexdigest())


def pack(
    named_tensors: NamedTensors,
    bucket_bytes: int,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    buffers: BucketBuffers | None = None,
) -> PackedWeights:
    """Copy tensors into buckets. Beside the copy, memory holds the tensors of one bucket at a time.

    Args:
        named_tensors: in wire order; each is read before the next one is requested.
        bucket_bytes: see :func:`rljob.protocol.weights.plan_buckets`.
        dtype: on the wire; None: that of each tensor.
        device: of the buckets.
        buffers: of the copy before, if they are on the host. They are reused if nothing sends it any more; those of one
            copy are kept.

    Raises:
        ValueError: the wire format does not support the type of a tensor.
    """
    parameters: list[ParameterMeta] = []
    buckets: list[torch.Tensor] = []
    pieces: list[torch.Tensor] = []
    filled = 0

    def close_bucket() -> None:
        nonlocal pieces, filled
        out = None if buffers is None else buffers.take(filled)
        buckets.append(torch.cat(pieces) if out is None else torch.cat(pieces, out=out))
        pieces, filled = [], 0

    for name, tensor in named_tensors:
        piece = tensor.detach().to(device, dtype or tensor.dtype)
        parameters.append(describe(name, piece))
        pieces.append(piece.contiguous().view(-1).view(torch.uint8))
        filled += pieces[-1].numel()
        if filled >= bucket_bytes:
            close_bucket()
    if pieces:
        close_bucket()
    if buffers is not None:
        buffers.keep(len(buckets))
    return PackedWeights(parameters, buckets)


def describe(name: str, tensor: torch.Tensor) -> ParameterMeta:
    """Return the metadata of a tensor.

    Raises:
        ValueError: the wire format does not support its type.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"parameter {name} is {dtype}; weights are sent as {', '.join(DTYPE_BYTES)}")
    return ParameterMeta(name, dtype, list(tensor.shape))
