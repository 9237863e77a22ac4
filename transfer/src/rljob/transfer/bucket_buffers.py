"""Memory of the host for buckets, kept from one update to the next.

The kernel clears every page of fresh memory at its first use, which takes about as long as the wire needs to fill it.
The receivers keep the buffers of the few buckets that they hold at a time, the sender those of its one copy of the
weights.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Memory: TypeAlias = npt.NDArray[np.uint8]


def plain_memory(size: int) -> Memory:
    """Return new memory, aligned for torch."""
    return torch.empty(size, dtype=torch.uint8).numpy()


def pinned_memory(size: int) -> Memory:
    """Return new memory that a GPU reads and writes without the help of the host."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()


class BucketBuffers:
    """Buffers that are lent as tensors, and lent again once no tensor refers to them. Thread-safe.

    A buffer is never overwritten while a tensor refers to it, for example a view that an engine holds. The next bucket
    then gets another buffer.

    Args:
        most: buffers to keep; None: all, until :meth:`keep` sets a number.
        most_bytes: size up to which a buffer is kept; None: any.
        allocate: size in bytes → new memory, with any contents.
    """

    def __init__(
        self,
        most: int | None = None,
        most_bytes: int | None = None,
        allocate: Callable[[int], Memory] | None = None,
    ) -> None:
        self._allocate = allocate or plain_memory
        self._most = most
        self._most_bytes = most_bytes
        self._kept: list[_Buffer] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> torch.Tensor:
        """Return uint8 memory of ``size`` bytes with any contents: of the smallest free buffer that is large enough,
        else of a new one."""
        with self._lock:
            free = sorted((buffer for buffer in self._kept if buffer.free()), key=lambda buffer: buffer.size)
            for buffer in free:
                if buffer.size >= size:
                    return buffer.lend(size)
            buffer = _Buffer(self._allocate(size))
            if self._most_bytes is None or size <= self._most_bytes:
                self._kept.append(buffer)
            if self._most is not None and len(self._kept) > self._most:
                self._kept.remove(free[0] if free else buffer)
            return buffer.lend(size)

    def keep(self, most: int) -> None:
        """Keep at most ``most`` buffers from now on."""
        with self._lock:
            self._most = most
            del self._kept[most:]

    def kept_bytes(self) -> int:
        """Return the bytes of all buffers that are kept, lent or not."""
        with self._lock:
            return sum(buffer.size for buffer in self._kept)


class _Buffer:
    """Some memory, of which one lease may exist: an array that the tensors on the memory keep alive."""

    def __init__(self, memory: Memory) -> None:
        self.size = len(memory)
        self._memory = memory
        self._lease: weakref.ref[Memory] | None = None

    def free(self) -> bool:
        return self._lease is None or self._lease() is None

    def lend(self, size: int) -> torch.Tensor:
        lease = self._memory[:size]
        self._lease = weakref.ref(lease)
        return torch.from_numpy(lease)
