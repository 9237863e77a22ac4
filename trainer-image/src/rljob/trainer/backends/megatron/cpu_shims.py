"""Megatron-Core on a CPU: everything that differs from a GPU is in this file.

The library names the device literally: ``torch.cuda.current_device()``, ``device="cuda"``, ``Tensor.cuda()``, pinned
memory, streams, and types such as ``torch.cuda.FloatTensor``. While :func:`megatron_on` is entered with a CPU, this
thread gets the CPU instead. Functions of torch.cuda and torch.distributed are replaced for all threads; tensors of
other threads are not affected. Outside the context nothing is replaced.

Tensors are gathered, and reduced and scattered, by messages between the ranks. gloo does both for tensors of one size
only, where NCCL takes any; experts that are split over tensor-parallel ranks need different sizes. It also copies the
whole tensor first, and reduces all of it on every rank: a third of a second for the gradient of 46 M parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rljob.trainer.backends.megatron.megatron_library import MODULES_THAT_EXCHANGE


class _Done:
    """A stream of a CPU, its events, and an exchange on it: all is done at once."""

    def record_event(self) -> _Done:
        """Return an event."""
        return self

    def synchronize(self) -> None:
        """Return at once."""

    wait = synchronize


_DONE = _Done()
_REPLACED: dict[str, Callable[..., Any]] = {
    "current_device": lambda: torch.device("cpu"),
    "synchronize": lambda device=None: None,
    "Stream": lambda: _DONE,
    "current_stream": lambda: _DONE,
    "stream": lambda stream: nullcontext(),
}
"""Functions of torch.cuda that the library calls, and what they do on a CPU."""
PIECE = 1 << 20  # elements that a rank receives from another at a time, to add them


def _exchange(sent: Sequence[Tensor], received: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Send each other rank its tensor of ``sent`` and fill its tensor of ``received``; all are flat."""
    rank, size = group.rank(), group.size()
    works: list[Any] = []
    for distance in range(1, size):
        after, before = (rank + distance) % size, (rank - distance) % size
        if sent[after].numel():
            works.append(dist.isend(sent[after], group=group, group_dst=after))
        if received[before].numel():
            works.append(dist.irecv(received[before], group=group, group_src=before))
    for work in works:
        work.wait()


def _all_gather(outputs: Sequence[Tensor], tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Fill ``outputs`` with the tensors of all ranks; ``tensor`` may be this rank's output."""
    received = [output.view(-1) for output in outputs]
    if received[group.rank()].data_ptr() != tensor.data_ptr():
        received[group.rank()].copy_(tensor.reshape(-1))
    _exchange([received[group.rank()]] * group.size(), received, group)


def _reduce_scatter(output: Tensor, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Fill ``output`` with the sum over the ranks of the tensors for this rank; it may be the tensor for this rank."""
    rank, sent, total = group.rank(), [tensor.reshape(-1) for tensor in tensors], output.view(-1)
    if total.data_ptr() != sent[rank].data_ptr():
        total.copy_(sent[rank])
    memory = total.new_empty(group.size(), min(PIECE, total.numel()))
    for start in range(0, max(tensor.numel() for tensor in sent), PIECE):
        piece = slice(start, start + PIECE)
        received = memory[:, : total[piece].numel()].unbind()
        _exchange([tensor[piece] for tensor in sent], received, group)
        for other in range(group.size()):
            if other != rank:
                total[piece] += received[other]


def _all_gather_single(output: Tensor, tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> _Done:
    """Fill ``output`` with the tensors of all ranks, one after the other."""
    _all_gather(output.view(group.size(), -1).unbind(), tensor, group)
    return _DONE


def _reduce_scatter_single(
    output: Tensor, tensor: Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM, async_op: bool = False
) -> _Done:
    """Fill ``output`` with the sum over the ranks of this rank's part of ``tensor``."""
    assert op == dist.ReduceOp.SUM, op
    _reduce_scatter(output, tensor.view(group.size(), -1).unbind(), group)
    return _DONE


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
        for module in MODULES_THAT_EXCHANGE:
            replaced.enter_context(_set(module, "dist_all_gather_func", _all_gather_single))
            replaced.enter_context(_set(module, "dist_reduce_scatter_func", _reduce_scatter_single))
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
