"""Megatron-Core on a CPU: everything that differs from a GPU is in this file.

The library names the device literally: ``torch.cuda.current_device()``, ``device="cuda"``, ``Tensor.cuda()``, pinned
memory, streams, and types such as ``torch.cuda.FloatTensor``. While :func:`megatron_on` is entered with a CPU, this
thread gets the CPU instead. Tensors of other threads are not affected, and nothing is outside the context.

gloo gathers and scatters tensors of one size only, where NCCL takes any. Experts that are split over tensor-parallel
ranks need different sizes, so they are exchanged one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _NoStream:
    """A stream of a CPU, and its events: what is put on it is done at once."""

    def record_event(self) -> _NoStream:
        """Return an event."""
        return self

    def synchronize(self) -> None:
        """Return at once."""


_STREAM = _NoStream()
_REPLACED: dict[str, Callable[..., Any]] = {
    "current_device": lambda: torch.device("cpu"),
    "synchronize": lambda device=None: None,
    "Stream": lambda: _STREAM,
    "current_stream": lambda: _STREAM,
    "stream": lambda stream: nullcontext(),
}
"""Functions of torch.cuda that the library calls, and what they do on a CPU."""


def _all_gather(outputs: Sequence[Tensor], tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Fill ``outputs`` with the tensors of all ranks, of any sizes."""
    outputs[group.rank()].copy_(tensor)
    for rank, output in enumerate(outputs):
        dist.broadcast(output, group=group, group_src=rank)


def _reduce_scatter(output: Tensor, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Fill ``output`` with the sum over the ranks of the tensors for this rank, of any sizes."""
    for rank, tensor in enumerate(tensors):
        own = tensor.clone(memory_format=torch.contiguous_format)
        dist.reduce(own, group=group, group_dst=rank)
        if rank == group.rank():
            output.copy_(own)


_IS_CUDA = Tensor.is_cuda.__get__  # type: ignore[attr-defined] # a property of the class


class _CudaMeansCpu(TorchFunctionMode):
    """Creates tensors for the device ``cuda`` on the CPU, without pinned memory, and gives tensors of the CPU the type
    names of CUDA. They say that they are on a GPU, because the library then copies the numbers of tokens for experts to
    the host, as an exchange needs them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return args[0]
        if func == _IS_CUDA:  # Python makes another object for each access
            return True
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
    with ExitStack() as replaced:
        for name, replacement in _REPLACED.items():
            replaced.enter_context(_set(torch.cuda, name, replacement))
        replaced.enter_context(_set(dist, "all_gather", _all_gather))
        replaced.enter_context(_set(dist, "reduce_scatter", _reduce_scatter))
        replaced.enter_context(_CudaMeansCpu())
        yield


@contextmanager
def _set(module: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, replacement)
    try:
        yield
    finally:
        setattr(module, name, original)
