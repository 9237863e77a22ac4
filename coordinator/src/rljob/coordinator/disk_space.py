"""Waits for space on the disk before a coordinator in a cluster begins.

The coordinator cannot work without its ledger: when the disk is full it exits, and its container is started again. The
new process then waits here, however long, so that a full disk costs one restart and not all of
`failurePolicy.maxRestarts`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

NEEDED_BYTES = 16 << 20
"""Free space needed to start: enough for some steps before the disk is full again."""
FIRST_SECONDS, LAST_SECONDS = 1.0, 30.0
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


async def wait_for_space(storage: Path) -> None:
    """Return once ``storage`` has NEEDED_BYTES free."""
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
    """Allocate and release: with quotas, not all space that is reported as free can be used."""
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
