"""Megatron-Core on a CPU: everything that differs from a GPU is in this file.

The library names the device literally: ``torch.cuda.current_device()``, ``device="cuda"``, ``Tensor.cuda()``, pinned
memory, and types such as ``torch.cuda.FloatTensor``. While :func:`megatron_on` is entered with a CPU, this thread gets
the CPU instead. Tensors of other threads, and everything outside the context, are not affected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_REPLACED: dict[str, Callable[..., Any]] = {
    "current_device": lambda: torch.device("cpu"),
    "synchronize": lambda device=None: None,
}
"""Functions of torch.cuda that the library calls, and what they do on a CPU."""


class _CudaMeansCpu(TorchFunctionMode):
    """Creates tensors for the device ``cuda`` on the CPU, without pinned memory, and gives tensors of the CPU the type
    names of CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.type and len(args) == 1 and not kwargs:
            name: str = func(*args)
            return name.replace("torch.", "torch.cuda.", 1)
        if kwargs.get("device") == "cuda":
            kwargs = {**kwargs, "device": "cpu"}
        if "pin_memory" in kwargs:
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


@contextmanager
def megatron_on(device: torch.device) -> Iterator[None]:
    """Make Megatron-Core use ``device`` inside; on a GPU this does nothing."""
    if device.type == "cuda":
        yield
        return
    originals = {name: getattr(torch.cuda, name) for name in _REPLACED}
    for name, replacement in _REPLACED.items():
        setattr(torch.cuda, name, replacement)
    try:
        with _CudaMeansCpu():
            yield
    finally:
        for name, original in originals.items():
            setattr(torch.cuda, name, original)
