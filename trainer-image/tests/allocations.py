"""Counts the bytes of tensors, so that a test can assert a peak of memory on CPU or on the meta device."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Bytes of the storages of one device that operations inside the mode made and that still exist.

    Attributes:
        current: bytes that exist.
        peak: the largest value of ``current``.
        largest: bytes of the largest storage.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.current = self.peak = self.largest = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(tensor.untyped_storage()) for tensor in _plain((args, kwargs))}
        for tensor in _plain(result):
            if tensor.device.type == self.device:
                self._count(tensor.untyped_storage(), given)
        return result

    def _count(self, storage: Any, given: set[int]) -> None:
        key = id(storage)
        if key in self._known or key in given:
            return
        size = storage.nbytes()
        self._known[key] = weakref.ref(storage, lambda _: self._free(key, size))
        self.current += size
        self.peak, self.largest = max(self.peak, self.current), max(self.largest, size)

    def _free(self, key: int, size: int) -> None:
        del self._known[key]
        self.current -= size


def _plain(values: Any) -> list[torch.Tensor]:
    """Return the tensors in ``values``; of a sharded tensor the shard."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    return [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]


@contextmanager
def saved_bytes() -> Iterator[list[int]]:
    """Yield a list that collects the bytes of the tensors saved for the backward pass."""
    sizes: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes
