"""Memory of the trainer that the processes of one machine can read: memfds, found below /proc by process and number.

A memfd has no name in a file system, so it ends with its last process, also after SIGKILL. Only processes of the same
user (and PID namespace) can open it. They read it, and never map it: so no process holds the trainer's memory.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
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


class _Pages(mmap.mmap):
    """The mapped memory of a memfd; a class of its own, because mmap has no weak references."""


_shared: dict[int, tuple[int, int]] = {}  # address → descriptor, inode


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
    address = memory.ctypes.data
    _shared[address] = descriptor, os.fstat(descriptor).st_ino
    weakref.finalize(pages, _release, address, descriptor)
    return memory


def _release(address: int, descriptor: int) -> None:
    del _shared[address]
    os.close(descriptor)


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
