"""Counts the bytes of the tensors that a piece of code holds at the same time."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class HeldBytes(TorchDispatchMode):
    """Peak of the bytes of all tensors that operations see. FSDP2 resizes storages, so sizes are read at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add(result, args, kwargs)
        sizes = {storage.data_ptr(): storage.nbytes() for ref in self._storages.values() if (storage := ref())}
        self.peak = max(self.peak, sum(sizes.values()))
        return result

    def add(self, *values: Any) -> None:
        """Count the tensors in ``values`` from now on."""
        for tensor in tree_leaves(values):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
                self._storages[id(storage)] = weakref.ref(storage)
