"""One round of weights in a weight group, by the wire format of :mod:`rljob.protocol.weights`: both ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import blake3
import torch

from rljob.protocol.messages import ParameterMeta
from rljob.protocol.weights import DIGEST_BYTES, DTYPE_BYTES, parameter_bytes, plan_buckets
from rljob.transfer.rendezvous import SENDER_RANK
from rljob.transfer.weight_group import WeightGroup

NamedTensors: TypeAlias = Iterable[tuple[str, torch.Tensor]]
LoadWeights: TypeAlias = Callable[[list[tuple[str, torch.Tensor]]], object]
"""Loads some tensors into the model. They are views of a buffer that is not reused for the next bucket."""


def describe(named_tensors: NamedTensors) -> list[ParameterMeta]:
    """Return the metadata of the tensors, in their order.

    Raises:
        ValueError: the wire format does not support the type of a tensor.
    """
    metas = []
    for name, tensor in named_tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"parameter {name} is {dtype}; weights are sent as {', '.join(DTYPE_BYTES)}")
        metas.append(ParameterMeta(name, dtype, list(tensor.shape)))
    return metas


def digest(named_tensors: NamedTensors) -> str:
    """Return the digest that :func:`send_round` returns for these tensors, blake3 hex."""
    hasher = blake3.blake3()
    for _, tensor in named_tensors:
        hasher.update(_hashable(_bytes_of(tensor)))
    return hasher.hexdigest()


def send_round(
    group: WeightGroup, tensors: Sequence[tuple[str, torch.Tensor]], bucket_bytes: int, deadline: float
) -> str:
    """Send all tensors and return their digest, blake3 hex, once every worker has loaded everything.

    Raises:
        RuntimeError: a worker died, or the deadline (``time.monotonic()``) passed.
        ValueError: a worker received other bytes.
    """
    hasher = blake3.blake3()
    for bucket in plan_buckets(describe(tensors), bucket_bytes):
        packed = torch.cat([_bytes_of(tensors[i][1]) for i in bucket]).to(group.device)
        hasher.update(_hashable(packed))
        group.broadcast(packed, SENDER_RANK, deadline)
    for rank in range(1, group.size):
        receipt = torch.zeros(DIGEST_BYTES, dtype=torch.uint8, device=group.device)
        group.broadcast(receipt, rank, deadline)
        if bytes(receipt.cpu().numpy()) != hasher.digest():
            raise ValueError("its digest differs from the digest of the sent bytes")
    return hasher.hexdigest()


def receive_round(
    group: WeightGroup, parameters: Sequence[ParameterMeta], bucket_bytes: int, load: LoadWeights, deadline: float
) -> str:
    """Receive all tensors, load them bucket by bucket and return their digest, blake3 hex.

    Raises:
        RuntimeError: a member died, or the deadline (``time.monotonic()``) passed.
    """
    hasher = blake3.blake3()
    for bucket in plan_buckets(parameters, bucket_bytes):
        metas = [parameters[i] for i in bucket]
        sizes = [parameter_bytes(meta) for meta in metas]
        packed = torch.empty(sum(sizes), dtype=torch.uint8, device=group.device)
        group.broadcast(packed, SENDER_RANK, deadline)
        hasher.update(_hashable(packed))
        load([(meta.name, _tensor_of(raw, meta)) for meta, raw in zip(metas, packed.split(sizes), strict=True)])
    receipt = torch.frombuffer(bytearray(hasher.digest()), dtype=torch.uint8).to(group.device)
    for rank in range(1, group.size):
        group.broadcast(receipt if rank == group.rank else torch.empty_like(receipt), rank, deadline)
    return hasher.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _tensor_of(raw: torch.Tensor, meta: ParameterMeta) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, meta.dtype)
    aligned = raw if raw.storage_offset() % dtype.itemsize == 0 else raw.clone()
    return aligned.view(dtype).view(meta.shape)


def _hashable(packed: torch.Tensor) -> memoryview:
    return packed.cpu().numpy().data
