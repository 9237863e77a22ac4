"""Families kill, stop and hang: signals to single processes, at protocol moments or at any time.

A process that is stopped for 20 s must survive. One that is stopped for 90 s counts as hung: its supervisor must
replace it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING

import psutil

from e2e.faults.proxy import Moment
from e2e.soak.fault import Family, Fault, FaultError

if TYPE_CHECKING:
    from e2e.soak.soak_run import SoakRun

STOP_SECONDS = 20.0
HANG_SECONDS = 90.0
POLL_SECONDS = 0.1
STARTING_SECONDS = {"agent": 4.0, "server": 4.0, "enginecore": 4.0, "trainer": 8.0}
"""Victim → seconds until the run continues, where that takes long. The other engine continues at once."""

KILLS = tuple(
    Fault("kill", "kill", victim, moment=moment, expected=4.0 + STARTING_SECONDS.get(victim, 0.0))
    for victim, moment in [
        ("server", None),
        ("enginecore", None),
        ("agent", None),
        ("trainer", None),
        ("coordinator", None),
        ("runner", None),
        ("reward", None),
        ("server", Moment("agent", "Generate", "after")),
        ("agent", Moment("agent", "Completions", "after")),
        ("runner", Moment("reward", "Score", "before")),
        ("reward", Moment("reward", "Score", "before")),
        ("trainer", Moment("trainer", "Pull", "after")),
        ("trainer", Moment("trainer", "Checkpoint", "after")),
        ("coordinator", Moment("trainer", "Train", "before")),
        ("coordinator", Moment("trainer", "WeightGroupReady", "after")),
        ("trainer", Moment("trainer", "SendWeights", "after")),
        ("server", Moment("agent", "PrepareWeights", "after")),
        ("agent", Moment("agent", "WeightAck", "before")),
    ]
)
STOPS = tuple(
    Fault("stop", "stop", victim, STOP_SECONDS, moment, expected=STOP_SECONDS + 5.0)
    for victim, moment in [
        ("enginecore", None),
        ("trainer", None),
        ("reward", None),
        ("server", Moment("agent", "Generate", "after")),
        ("agent", Moment("agent", "PrepareWeights", "after")),
        ("trainer", Moment("trainer", "SendWeights", "after")),
        ("coordinator", Moment("trainer", "StepDone", "before")),
        ("runner", Moment("runner", "GenerateResult", "after")),
        ("reward", Moment("reward", "Score", "before")),
    ]
)
HANGS = tuple(
    Fault("hang", "stop", victim, HANG_SECONDS, expected=65.0 + STARTING_SECONDS.get(victim, 0.0))
    for victim in ("enginecore", "trainer", "coordinator", "runner", "agent", "reward")
)


def kill(run: SoakRun, fault: Fault) -> None:
    """Send SIGKILL to the victim."""
    _send(run.victim(fault), signal.SIGKILL)


def stop(run: SoakRun, fault: Fault) -> None:
    """Send SIGSTOP to the victim."""
    run.stopped = run.victim(fault)
    _send(run.stopped, signal.SIGSTOP)


async def nothing_lasts(run: SoakRun, fault: Fault) -> None:
    """Return at once: a kill is over when it has happened."""


async def continue_it(run: SoakRun, fault: Fault) -> None:
    """Send SIGCONT to the victim of a short stop after its time.

    Raises:
        FaultError: it was killed.
    """
    await asyncio.sleep(fault.seconds)
    if not _is_running(run.stopped):
        raise FaultError(f"{fault.victim} did not survive a stop of {fault.seconds:g} s")
    _send(run.stopped, signal.SIGCONT)


async def wait_replaced(run: SoakRun, fault: Fault) -> None:
    """Wait until the supervisor has killed the victim of a long stop.

    Raises:
        FaultError: it was not killed within the time of the stop.
    """
    deadline = time.monotonic() + fault.seconds
    while _is_running(run.stopped):
        if time.monotonic() > deadline:
            _send(run.stopped, signal.SIGCONT)
            raise FaultError(f"{fault.victim} was not replaced during a stop of {fault.seconds:g} s")
        await asyncio.sleep(POLL_SECONDS)  # not a child of this process


def _is_running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        raise FaultError(f"process {process.pid} has ended before the fault") from None


KILL = Family(KILLS, 8, kill, nothing_lasts)
STOP = Family(STOPS, 3, stop, continue_it)
HANG = Family(HANGS, 1, stop, wait_replaced)
