"""Waiting for room on the disk before a coordinator in a cluster begins.

Without its ledger it can do nothing: when the disk is full it dies, and its container is started again. Here it then
waits, however long, so that a full disk costs one restart and not all of `failurePolicy.maxRestarts`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

NEEDED_BYTES = 16 << 20
"""So much must be free: enough to get somewhere before it is full again."""
FIRST_SECONDS, LAST_SECONDS = 1.0, 30.0
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


async def wait_for_space(storage: Path) -> None:
    """Return once ``storage`` has room for NEEDED_BYTES."""
    seconds, waited = FIRST_SECONDS, False
    while not _has_space(storage):
        if not waited:
            log.warning("the disk of %s is full: make room there; waiting for %d MiB", storage, NEEDED_BYTES >> 20)
        waited = True
        await asyncio.sleep(seconds)
        seconds = min(2 * seconds, LAST_SECONDS)
    if waited:
        log.info("there is room in %s again", storage)


def _has_space(storage: Path) -> bool:
    """Allocate and give back: what is said to be free need not be ours (quotas)."""
    probe = storage / ".room"
    try:
        file = os.open(probe, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.posix_fallocate(file, 0, NEEDED_BYTES)
        finally:
            os.close(file)
            probe.unlink()
    except OSError as error:
        if error.errno in FULL:
            return False
        log.debug("%s: %s", probe, error)  # no allocation on this file system: the ledger will see
    return True
