"""The listening socket of a gloo device. gloo accepts connections for as long as the communicator exists, never closes
one that names no pair of members, and ends the process when it has no descriptor for one.

Called by :mod:`rljob.transfer.weight_group` and ``rljob.trainer.process_group``: more descriptors while the members
connect, no connections afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import socket
import struct
from collections.abc import Iterator, Sequence

SO_ATTACH_FILTER = 26  # the socket module has no name for it
_DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
"""The classic BPF program of one instruction, ``BPF_RET | BPF_K`` with the constant 0: keep no byte of any packet."""
_PROGRAM = struct.pack("HP", 1, ctypes.addressof(_DROP_ALL))  # struct sock_fprog
_LIBC = ctypes.CDLL(None)  # a socket object would have to own the descriptor, or a copy, which changes gloo's epoll


def raise_descriptor_limit() -> None:
    """Set the soft limit of open descriptors to the hard limit, if the kernel allows it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # the hard limit exceeds that of the system
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def accepting_until_formed() -> Iterator[None]:
    """Let groups that a block creates accept connections in the block only. No other thread may begin to listen in it.

    torch creates the devices of these groups, so their sockets are those that the block adds.
    """
    before = set(_listening().values())
    yield
    drop_new_connections(list(set(_listening().values()) - before))


def drop_new_connections(values: Sequence[bytes]) -> None:
    """Drop every packet that arrives at this process's listening sockets whose address is part of one of ``values``.

    The filter of a listening socket does not affect the connections that it has accepted. Where the kernel refuses
    filters, the sockets continue to accept.

    Args:
        values: what gloo gave to the other members: each has the ``sockaddr`` of the device.
    """
    for descriptor, address in _listening().items():
        if any(address in value for value in values):
            _LIBC.setsockopt(descriptor, socket.SOL_SOCKET, SO_ATTACH_FILTER, _PROGRAM, len(_PROGRAM))


def _listening() -> dict[int, bytes]:
    """Return the address of each listening socket of this process, by its descriptor."""
    addresses = {each: _listening_address(each) for each in map(int, os.listdir("/proc/self/fd"))}
    return {descriptor: address for descriptor, address in addresses.items() if address}


def _listening_address(descriptor: int) -> bytes:
    """Return the ``sockaddr`` of a listening socket; b"" for other descriptors."""
    listens, length = ctypes.c_int(), ctypes.c_uint(ctypes.sizeof(ctypes.c_int))
    option = (socket.SOL_SOCKET, socket.SO_ACCEPTCONN, ctypes.byref(listens), ctypes.byref(length))
    if _LIBC.getsockopt(descriptor, *option) or not listens.value:
        return b""
    address = ctypes.create_string_buffer(128)  # sizeof(struct sockaddr_storage)
    length = ctypes.c_uint(len(address))
    failed = _LIBC.getsockname(descriptor, address, ctypes.byref(length))
    return b"" if failed else address.raw[: length.value]
