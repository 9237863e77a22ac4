"""Whole tensors from the shards of all ranks, in any type, several tensors in one collective."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
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
        parameters: sharded over all ranks of one mesh on their first dimension.
        dtype: type of the tensors.
        bucket_bytes: bytes of whole tensors that are gathered at a time.
    """
    bucket: dict[str, DTensor] = {}
    size = 0
    for name, parameter in parameters.items():
        needed = parameter.numel() * dtype.itemsize
        if bucket and size + needed > bucket_bytes:
            yield from _gather(bucket, dtype)
            bucket, size = {}, 0
        bucket[name] = cast(DTensor, parameter.detach())
        size += needed
    yield from _gather(bucket, dtype)


def _gather(bucket: Mapping[str, DTensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Gather the tensors of a bucket: each rank sends its rows of all of them, padded to those of the first rank."""
    mesh = next(iter(bucket.values())).device_mesh
    if mesh.size() == 1:
        yield from ((name, parameter.to_local().to(dtype)) for name, parameter in bucket.items())
        return
    ranks = mesh.size()
    sizes = [-(-len(parameter) // ranks) * math.prod(parameter.shape[1:]) for parameter in bucket.values()]
    local = next(iter(bucket.values())).to_local()
    mine = torch.zeros(sum(sizes), dtype=dtype, device=local.device)
    for part, parameter in zip(mine.split(sizes), bucket.values(), strict=True):
        own = parameter.to_local()
        part[: own.numel()].copy_(own.reshape(-1))
    gathered = torch.empty(ranks, sum(sizes), dtype=dtype, device=local.device)
    dist.all_gather_into_tensor(gathered.view(-1), mine, group=mesh.get_group())
    for part, (name, parameter) in zip(gathered.split(sizes, dim=1), bucket.items(), strict=True):
        yield name, part.reshape(-1)[: parameter.numel()].view(parameter.shape)
