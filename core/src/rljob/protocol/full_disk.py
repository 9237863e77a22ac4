"""Errors of a disk without room."""

from __future__ import annotations

import errno

FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Values of OSError.errno: the disk is full, or a quota or the largest size of a file is reached."""
