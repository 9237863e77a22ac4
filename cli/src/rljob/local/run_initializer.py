"""Downloads a job's remote models and runs its initializer once; the initializer runs again only if its inputs changed
and no run has used its output."""

from __future__ import annotations

from pathlib import Path

from rljob.api.model_address import is_remote
from rljob.api.models import RLJob
from rljob.api.resolve import in_storage
from rljob.local import commands, process_cleanup, processes
from rljob.local.errors import CliError, Interrupted
from rljob.local.processes import Interrupt, ProcessCommand
from rljob.local.run_directory import RunDirectory
from rljob.protocol import initializer_stamp as stamps
from rljob.protocol.exit_codes import CONFIGURATION_ERROR, FAILURE
from rljob.protocol.model_cache import find_model

NAME = commands.INITIALIZER


async def initialize(job: RLJob, directory: RunDirectory, interrupt: Interrupt) -> None:
    """Download remote models, then run the initializer unless the storage holds its output.

    Raises:
        CliError: a download or the initializer failed, or it created no model.
        Interrupted: the run was stopped.
    """
    remote = [model.source for model in job.spec.models if is_remote(model.source)]
    if any(find_model(source, directory.path) is None for source in remote):
        try:
            command = commands.download(job, directory.path)
            await _run_once(command, directory, interrupt, "the download of the models")
        except CliError as error:
            sentence = processes.last_error(processes.log_path(directory.path, NAME))
            raise CliError(sentence or error.sentence, error.exit_code, error.log) from None
    if job.spec.initializer is None:
        return
    key = stamps.content_key(job)
    if stamps.done(directory.path, key):
        directory.tell(NAME, "cached")
        return
    await _run_once(commands.initializer(job, directory.path), directory, interrupt, "the initializer")
    for i, model in enumerate(job.spec.models):
        path = Path(in_storage(model.source, directory.path))
        if not (is_remote(model.source) or path.is_dir()):
            message = f"spec.models[{i}].source: the initializer created no directory {path}"
            raise CliError(message, log=_tail(directory))
    stamps.mark_done(directory.path, key)


async def _run_once(command: ProcessCommand, directory: RunDirectory, interrupt: Interrupt, what: str) -> None:
    try:
        process = await processes.start(command, directory.path)
    except OSError as error:
        raise CliError(f"spec.initializer.command: cannot be started: {error}", 2) from None
    directory.tell(NAME, "started", pid=process.pid)
    await processes.first(process.wait(), interrupt.stop.wait())
    if process.returncode is None:
        await processes.end(process, interrupt.kill)
    process_cleanup.kill_marked(processes.mark(directory.path, NAME))
    process.close_log()
    directory.tell(NAME, "exited", pid=process.pid, code=process.returncode)
    if interrupt.stop.is_set():
        raise Interrupted
    if process.returncode:
        code = CONFIGURATION_ERROR if process.returncode == CONFIGURATION_ERROR else FAILURE
        how = processes.describe_exit(process.returncode)
        raise CliError(f"{what} {how}; see the end of its log", code, _tail(directory))


def _tail(directory: RunDirectory) -> str:
    return processes.tail(processes.log_path(directory.path, NAME))
