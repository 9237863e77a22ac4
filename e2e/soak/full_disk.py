"""Family disk: the disk of the run directory is full for some seconds."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from e2e.faults import disk
from e2e.faults.proxy import Moment
from e2e.soak.fault import Family, Fault

if TYPE_CHECKING:
    from e2e.soak.soak_run import SoakRun

FULL_SECONDS = 10.0

CASES = tuple(
    Fault("disk", "fill", "disk", FULL_SECONDS, moment, expected=FULL_SECONDS + 12.0)
    for moment in (
        Moment("trainer", "Checkpoint", "before"),
        Moment("agent", "Completions", "before"),
        Moment("trainer", "Train", "after"),
        None,
    )
)


def fill(run: SoakRun, fault: Fault) -> None:
    """Fill the disk."""
    disk.fill(run.directory)


async def make_room(run: SoakRun, fault: Fault) -> None:
    """Free the space after the time of the fault."""
    try:
        await asyncio.sleep(fault.seconds)
    finally:
        disk.empty(run.directory)


DISK = Family(CASES, 2, fill, make_room)
