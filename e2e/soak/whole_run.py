"""Family restart: everything of a run is killed, files are torn as by a power cut, and the run is resumed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from e2e.faults.proxy import Moment
from e2e.soak import victims
from e2e.soak.fault import Family, Fault, FaultError

if TYPE_CHECKING:
    from e2e.soak.soak_run import SoakRun

TORN_BYTES = 7
CHECKPOINT = "newest checkpoint"
COMPLETE = re.compile(r"step-\d+")
START_SECONDS = 180.0
"""Longest time until the trainer of a resumed run has loaded a checkpoint."""

CASES = tuple(
    Fault("restart", kind, victim, moment=moment, expected=40.0)
    for kind, victim, moment in [
        ("kill group, tear", "last lines", None),
        ("kill group and reaper, tear", "payload", Moment("agent", "Completions", "after")),
        ("kill everything, tear", "all files", Moment("trainer", "Checkpoint", "after")),
        ("kill everything, tear", "all files", None),
        ("kill everything, damage", CHECKPOINT, Moment("trainer", "Checkpointed", "after")),
    ]
)


def kill(run: SoakRun, fault: Fault) -> None:
    """Send SIGKILL to the process group of `rljob run`, also to its reaper, or also to every process of the run.

    Raises:
        FaultError: the newest checkpoint is to be damaged, and there is none before it.
    """
    if fault.victim == CHECKPOINT and len(_checkpoints(run.directory)) < 2:
        raise FaultError("there are not two checkpoints yet")
    pids: list[int] = []
    if "everything" in fault.kind:
        pids += victims.processes(run.directory)
    if "everything" in fault.kind or "reaper" in fault.kind:
        pids += victims.reapers(run.rljob.pid)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os.killpg(run.rljob.pid, signal.SIGKILL)


async def resume(run: SoakRun, fault: Fault) -> None:
    """Check that nothing is left of the killed run and that its audit is clean; damage files; start the run again.

    Raises:
        FaultError: a process is left, or a damaged checkpoint is used.
    """
    await run.rljob.exited
    await run.rljob.wait_clean()
    await run.audit()
    expected = await asyncio.to_thread(damage, run.directory, fault.victim, run.random)
    await run.start()
    if expected is not None:
        async with asyncio.timeout(START_SECONDS):
            await run.until(run.trainer_registered)
        if run.registered_step != expected:
            raise FaultError(f"the trainer continues from step {run.registered_step}, not from checkpoint {expected}")


def damage(directory: Path, what: str, rng: random.Random) -> int | None:
    """Damage files of a run that was killed; return the step that the trainer must resume from, if that changes."""
    if what == CHECKPOINT:
        *_, previous, newest = _checkpoints(directory)
        _overwrite(newest / "model.safetensors", rng)
        return int(previous.name.removeprefix("step-"))
    if what in ("last lines", "all files"):
        for name in ("events.jsonl", "metrics.jsonl"):
            path = directory / name
            os.truncate(path, max(0, path.stat().st_size - TORN_BYTES))
    if what in ("payload", "all files"):
        for segments in ("payload", "texts"):
            newest = max((directory / segments).iterdir())
            with newest.open("ab") as file:
                file.write(rng.randbytes(5 * TORN_BYTES))
    if what == "all files":
        (directory / "status.json").write_bytes(b"")
        (directory / "ports.json").write_bytes(b"{")
    return None


def _checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    return sorted(path for path in (directory / "checkpoints").glob("step-*") if COMPLETE.fullmatch(path.name))


def _overwrite(path: Path, rng: random.Random) -> None:
    """Overwrite a thousandth of a file in its middle."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        file.write(rng.randbytes(size // 1000))


RESTART = Family(CASES, 2, kill, resume)
