"""Runs a job's initializer once: again only if what it is made of changed and nobody used what it made."""

from __future__ import annotations

from pathlib import Path

from rljob.api.models import RLJob
from rljob.api.resolve import in_storage
from rljob.local import plan, processes, sweep
from rljob.local.directory import RunDirectory
from rljob.local.errors import Interrupted, RunError
from rljob.local.processes import Command, Interrupt
from rljob.protocol import initializer_stamp as stamps
from rljob.protocol.exit_codes import CONFIGURATION_ERROR, FAILURE

NAME = plan.INITIALIZER


async def initialize(job: RLJob, directory: RunDirectory, interrupt: Interrupt) -> None:
    """Run the initializer unless the storage holds what it makes.

    Raises:
        RunError: it failed, or left no model.
        Interrupted: the run was stopped meanwhile.
    """
    if job.spec.initializer is None:
        return
    key = stamps.content_key(job)
    if stamps.done(directory.path, key):
        directory.tell(NAME, "cached")
        return
    await _run_once(plan.initializer(job, directory.path), directory, interrupt)
    for i, model in enumerate(job.spec.models):
        path = Path(in_storage(model.source, directory.path))
        if not path.is_dir():
            raise RunError(f"spec.models[{i}].source: the initializer left no directory {path}", log=_tail(directory))
    stamps.mark_done(directory.path, key)


async def _run_once(command: Command, directory: RunDirectory, interrupt: Interrupt) -> None:
    try:
        process = await processes.start(command, directory.path)
    except OSError as error:
        raise RunError(f"spec.initializer.command: cannot be started: {error}", 2) from None
    directory.tell(NAME, "started", pid=process.pid)
    await processes.first(process.wait(), interrupt.stop.wait())
    if process.returncode is None:
        await processes.end(process, interrupt.kill)
    sweep.sweep(processes.mark(directory.path, NAME))
    directory.tell(NAME, "exited", pid=process.pid, code=process.returncode)
    if interrupt.stop.is_set():
        raise Interrupted
    if process.returncode:
        code = CONFIGURATION_ERROR if process.returncode == CONFIGURATION_ERROR else FAILURE
        how = processes.describe_exit(process.returncode)
        raise RunError(f"the initializer {how}; see the end of its log", code, _tail(directory))


def _tail(directory: RunDirectory) -> str:
    return processes.tail(processes.log_path(directory.path, NAME))
