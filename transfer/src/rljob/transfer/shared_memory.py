"""Memory of the trainer that the processes of one machine can read: memfds, found below /proc by process and number.

A memfd has no name in a file system, so it ends with its last process, also after SIGKILL. Only processes of the same
user (and PID namespace) can open it. They read it, and never map it: so no process holds the trainer's memory.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass

import numpy as np
import torch

from rljob.transfer.bucket_buffers import Memory

_HANDLE = struct.Struct("!4Q")
HANDLE_BYTES = _HANDLE.size


@dataclass(frozen=True)
class Handle:
    """Shared memory of a process.

    Attributes:
        process: id of the process.
        descriptor: of the memfd in it.
        inode: of the memfd; another file may get the same descriptor later.
        size: bytes to read, from the first one.
    """

    process: int
    descriptor: int
    inode: int
    size: int

    def encode(self) -> bytes:
        """Return HANDLE_BYTES bytes."""
        return _HANDLE.pack(self.process, self.descriptor, self.inode, self.size)

    @classmethod
    def decode(cls, message: bytes) -> Handle:
        """Return the handle of a message."""
        return cls(*_HANDLE.unpack(message))


_shared: dict[int, tuple[int, int]] = {}  # address → descriptor, inode


class _Pages(mmap.mmap):
    """The mapped memory of a memfd, which is forgotten in ``__del__``, before Python unmaps it. The callback of a weak
    reference to an mmap runs after that, when another thread may have got new memory at the same address."""

    address = 0

    def __del__(self) -> None:
        descriptor, _ = _shared.pop(self.address, (None, None))
        if descriptor is not None:
            os.close(descriptor)


def shared_memory(size: int) -> Memory:
    """Return new memory that other processes can read."""
    descriptor = os.memfd_create("rljob-weights", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        pages = _Pages(descriptor, size)
    except BaseException:  # re-raised: no memory is left
        os.close(descriptor)
        raise
    memory = np.frombuffer(pages, np.uint8)
    pages.address = memory.ctypes.data
    _shared[pages.address] = descriptor, os.fstat(descriptor).st_ino
    return memory


def handle_of(tensor: torch.Tensor) -> Handle:
    """Return the handle of a tensor at the beginning of memory from :func:`shared_memory`."""
    return Handle(os.getpid(), *_shared[tensor.data_ptr()], tensor.nbytes)


def read_shared(handle: Handle, into: torch.Tensor) -> None:
    """Copy shared memory of any process of this machine.

    Args:
        handle: of the memory.
        into: uint8, contiguous, on the host, of the size in the handle.

    Raises:
        OSError: the memory does not exist any more, belongs to another user, or is on another machine.
    """
    descriptor = os.open(f"/proc/{handle.process}/fd/{handle.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_ino != handle.inode or handle.size != into.nbytes:
            raise FileNotFoundError(f"process {handle.process} has other shared memory")
        rest = into.numpy().data
        while len(rest):
            read = os.preadv(descriptor, [rest], handle.size - len(rest))
            if not read:
                raise FileNotFoundError(f"process {handle.process} has less shared memory")
            rest = rest[read:]
    finally:
        os.close(descriptor)
