"""What is equal in all updates: names, types, shapes, buckets and places of the tensors on the wire. Made once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from rljob.api.memory_plan import DTYPE_BYTES
from rljob.protocol.known_tensors import tensors_digest
from rljob.protocol.shared_messages import ParameterMeta
from rljob.protocol.weights import parameter_bytes, plan_buckets

NamedTensors: TypeAlias = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class PackedTensor:
    """One tensor in its bucket.

    Attributes:
        meta: name, type and shape.
        dtype: of torch.
        start: first byte in the bucket.
        end: byte after the last one.
    """

    meta: ParameterMeta
    dtype: torch.dtype
    start: int
    end: int

    def bytes_of(self, bucket: torch.Tensor) -> torch.Tensor:
        """Return the bytes of the tensor: a view of the bucket."""
        return bucket[self.start : self.end]

    def tensor_of(self, bucket: torch.Tensor) -> torch.Tensor:
        """Return the tensor: a view of the bucket, or a copy if it is not aligned there."""
        raw = self.bytes_of(bucket)
        aligned = raw if raw.storage_offset() % self.dtype.itemsize == 0 else raw.clone()
        return aligned.view(self.dtype).view(self.meta.shape)

    def write(self, bucket: torch.Tensor, tensor: torch.Tensor) -> None:
        """Convert ``tensor`` and copy it to its place; from a GPU in its current stream, without waiting."""
        raw = self.bytes_of(bucket)
        if self.start % self.dtype.itemsize == 0:
            raw.view(self.dtype).view(self.meta.shape).copy_(tensor, non_blocking=True)
        else:
            raw.copy_(tensor.to(self.dtype).contiguous().view(-1).view(torch.uint8))


class WirePlan:
    """Buckets of tensors, by the wire format of :mod:`rljob.protocol.weights`.

    Args:
        parameters: in wire order.
        bucket_bytes: see :func:`rljob.protocol.weights.plan_buckets`.

    Attributes:
        buckets: the tensors of each bucket.
        sizes: bytes of each bucket.
        tensors: digest of the parameters, see :mod:`rljob.protocol.known_tensors`.
    """

    def __init__(self, parameters: Sequence[ParameterMeta], bucket_bytes: int) -> None:
        self.parameters = list(parameters)
        self.bucket_bytes = bucket_bytes
        self.buckets = [_pieces([self.parameters[i] for i in run]) for run in plan_buckets(parameters, bucket_bytes)]
        self.sizes = [pieces[-1].end for pieces in self.buckets]
        self.tensors = tensors_digest(self.parameters)

    @classmethod
    def of(cls, tensors: NamedTensors, bucket_bytes: int, dtype: torch.dtype | None = None) -> WirePlan:
        """Return the plan of tensors, whose contents are not read. ``dtype``: on the wire; None: that of each tensor.

        Raises:
            ValueError: the wire format does not support the type of a tensor.
        """
        return cls([_describe(name, tensor.shape, dtype or tensor.dtype) for name, tensor in tensors], bucket_bytes)


def _pieces(metas: Sequence[ParameterMeta]) -> list[PackedTensor]:
    pieces: list[PackedTensor] = []
    for meta in metas:
        start = pieces[-1].end if pieces else 0
        pieces.append(PackedTensor(meta, getattr(torch, meta.dtype), start, start + parameter_bytes(meta)))
    return pieces


def _describe(name: str, shape: torch.Size, dtype: torch.dtype) -> ParameterMeta:
    text = str(dtype).removeprefix("torch.")
    if text not in DTYPE_BYTES:
        raise ValueError(f"parameter {name} is {text}; weights are sent as {', '.join(DTYPE_BYTES)}")
    return ParameterMeta(name, text, list(shape))
