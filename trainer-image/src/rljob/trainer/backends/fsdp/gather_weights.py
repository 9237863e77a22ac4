"""Whole tensors from the shards of all ranks, several tensors in one collective: every tensor on every rank, in any
type, or each tensor on one rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

BUCKET_BYTES = 1 << 28  # of whole tensors gathered at a time; a larger tensor is gathered alone


def whole_tensors(
    parameters: Mapping[str, DTensor], dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter as a whole tensor, in the order of ``parameters``; all ranks take part.

    Shards are converted before they are gathered, so that the bytes on the wire are those of ``dtype``. A tensor may
    share memory with the model and with the tensors of its bucket.

    Args:
        parameters: sharded over the last dimension of one mesh on their first dimension. The ranks of the last
            dimension gather them; the other dimension holds copies.
        dtype: type of the tensors.
        bucket_bytes: bytes of whole tensors that are gathered at a time.
    """
    for bucket in _buckets(parameters.items(), dtype, bucket_bytes):
        yield from _gather(bucket, dtype)


def _buckets(
    tensors: Iterable[tuple[str, DTensor]], dtype: torch.dtype, bucket_bytes: int
) -> Iterator[dict[str, DTensor]]:
    """Yield the tensors in buckets of at most ``bucket_bytes`` in ``dtype``; a larger tensor is alone."""
    bucket: dict[str, DTensor] = {}
    size = 0
    for name, tensor in tensors:
        needed = tensor.numel() * dtype.itemsize
        if bucket and size + needed > bucket_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = cast(DTensor, tensor.detach())
        size += needed
    yield bucket


def _gather(bucket: Mapping[str, DTensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Gather the tensors of a bucket: each rank sends its rows of all of them, padded to those of the first rank."""
    mesh = next(iter(bucket.values())).device_mesh
    ranks, group = mesh.size(mesh.ndim - 1), mesh.get_group(mesh.ndim - 1)
    if ranks == 1:
        yield from ((name, parameter.to_local().to(dtype)) for name, parameter in bucket.items())
        return
    sizes = [-(-len(parameter) // ranks) * math.prod(parameter.shape[1:]) for parameter in bucket.values()]
    local = next(iter(bucket.values())).to_local()
    mine = torch.zeros(sum(sizes), dtype=dtype, device=local.device)
    for part, parameter in zip(mine.split(sizes), bucket.values(), strict=True):
        own = parameter.to_local()
        part[: own.numel()].copy_(own.reshape(-1))
    gathered = torch.empty(ranks, sum(sizes), dtype=dtype, device=local.device)
    dist.all_gather_into_tensor(gathered.view(-1), mine, group=group)
    for part, (name, parameter) in zip(gathered.split(sizes, dim=1), bucket.items(), strict=True):
        yield name, part.reshape(-1)[: parameter.numel()].view(parameter.shape)


def assign_tensors(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return tensor → rank such that each rank has about the same size: the largest tensors first, each to the rank
    with the least. No rank has more than the mean and the largest tensor together."""
    loads = [0] * ranks
    assigned = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        assigned[name] = min(range(ranks), key=loads.__getitem__)
        loads[assigned[name]] += sizes[name]
    return assigned


def own_tensors(
    tensors: Iterable[tuple[str, DTensor]], ranks: Mapping[str, int], bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor that this rank has in ``ranks`` as a whole tensor: a copy on the host. All ranks take part.

    The device holds at most one bucket besides the shards, or the largest tensor.

    Args:
        tensors: of one type, sharded as for :func:`whole_tensors`.
        ranks: tensor → rank, from :func:`assign_tensors`.
        bucket_bytes: bytes of whole tensors that are exchanged at a time.
    """
    for bucket in _buckets(tensors, torch.float32, bucket_bytes):
        yield from _exchange(bucket, ranks)


def _exchange(bucket: Mapping[str, DTensor], ranks: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
    """Send the rows of each tensor of a bucket to the rank that has it."""
    mesh = next(iter(bucket.values())).device_mesh
    size, group = mesh.size(mesh.ndim - 1), mesh.get_group(mesh.ndim - 1)
    if size == 1:
        yield from ((name, _host_copy(tensor.to_local())) for name, tensor in bucket.items())
        return
    members = range(size)
    own = {name: tensor for name, tensor in bucket.items() if ranks[name] == mesh.get_local_rank(mesh.ndim - 1)}
    shards = {rank: [t.to_local().reshape(-1) for name, t in bucket.items() if ranks[name] == rank] for rank in members}
    sent = [sum(map(len, shards[rank])) for rank in members]
    pieces = [[_elements(tensor, rank, len(members)) for tensor in own.values()] for rank in members]
    received = [sum(sizes) for sizes in pieces]
    mine = torch.cat([shard for rank in members for shard in shards[rank]])
    gathered = mine.new_empty(sum(received))
    dist.all_to_all_single(gathered, mine, received, sent, group=group)
    rows = [part.split(sizes) for part, sizes in zip(gathered.split(received), pieces, strict=True)]
    for i, (name, tensor) in enumerate(own.items()):
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        for into, piece in zip(whole.view(-1).split([sizes[i] for sizes in pieces]), rows, strict=True):
            into.copy_(piece[i])
        yield name, whole


def _elements(tensor: DTensor, rank: int, ranks: int) -> int:
    """Return the number of elements of a rank's shard: as many rows as those of the first rank while there are any."""
    rows = -(-len(tensor) // ranks)
    return max(0, min(rows, len(tensor) - rank * rows)) * math.prod(tensor.shape[1:])


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
