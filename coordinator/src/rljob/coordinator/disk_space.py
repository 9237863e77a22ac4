"""Waits for disk space before a coordinator in a cluster starts.

The coordinator cannot work without its ledger: when the disk is full it exits, and its container is restarted. The new
process waits here without a time limit, so that a full disk costs one restart and not all of
`failurePolicy.maxRestarts`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

from rljob.protocol.full_disk import FULL_DISK

log = logging.getLogger(__name__)

NEEDED_BYTES = 16 << 20
"""Free space needed to start: enough for some steps before the disk is full again."""
FIRST_SECONDS, LAST_SECONDS = 1.0, 30.0


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
        log.info("the disk of %s has free space again", storage)


def _has_space(storage: Path) -> bool:
    """Allocate NEEDED_BYTES and release them: with quotas, the reported free space may not be usable."""
    probe = storage / ".room"
    try:
        file = os.open(probe, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.posix_fallocate(file, 0, NEEDED_BYTES)
        finally:
            os.close(file)
            probe.unlink()
    except OSError as error:
        if error.errno in FULL_DISK:
            return False
        # Not supported on this file system: the ledger itself reports a full disk.
        log.debug("%s: %s", probe, error)
    return True
