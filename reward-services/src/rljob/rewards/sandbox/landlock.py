"""Landlock: rules on files, TCP ports, signals and abstract sockets that a process puts on itself.

Only system calls, through ctypes: no package is needed. Source: Documentation/userspace-api/landlock.rst of Linux.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Mapping
from typing import Any

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same numbers on all architectures
_VERSION_FLAG = 1
_PATH_BENEATH = 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
READ = READ_FILE | READ_DIR
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | 1 << 14
"""Rights that a rule on a file may give."""
_LAST_FS_RIGHT = {1: 12, 2: 13, 3: 14, 4: 14}  # ABI → highest bit; from ABI 5 it is 15
MAKE = sum(1 << bit for bit in (4, 5, 7, 8, 12, 13, 14))
"""Rights in a directory of the program's own: to remove and make files, directories and links, refer, truncate."""
_TCP = 0b11
_SCOPES = 0b11  # abstract UNIX sockets, signals

_libc = ctypes.CDLL(None, use_errno=True)


def abi() -> int:
    """Return the version of Landlock in the kernel; 0: it has none, or it is not permitted."""
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION_FLAG))))


def make_ruleset(rights: Mapping[str, int]) -> int:
    """Return the descriptor of a set of rules that refuses everything that this kernel can refuse, except ``rights``.

    Args:
        rights: path → bits of access to the file, or to the directory and all below it. Paths that do not exist are
            left out.

    Raises:
        OSError: the kernel refuses.
    """
    version = abi()
    handled = (1 << _LAST_FS_RIGHT.get(version, 15) + 1) - 1
    attributes = struct.pack("=Q", handled)
    if version >= 4:
        attributes += struct.pack("=Q", _TCP)
    if version >= 6:
        attributes += struct.pack("=Q", _SCOPES)
    ruleset = _checked(_libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0)))
    for path, bits in rights.items():
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            rule = struct.pack("=Qi", bits & handled, place)
            _checked(_libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, ctypes.c_uint(0)))
        finally:
            os.close(place)
    return ruleset


def enter(ruleset: int) -> None:
    """Put the rules on this thread for ever; the thread must have no new privileges already.

    Raises:
        OSError: the kernel refuses.
    """
    function, *arguments = entering(ruleset)
    _checked(function(*arguments))


def entering(ruleset: int) -> tuple[Any, ...]:
    """Return the call of :func:`enter`: a function of the C library, which returns 0 or sets errno, and arguments."""
    return _libc.syscall, _RESTRICT_SELF, ruleset, ctypes.c_uint(0)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    return result
