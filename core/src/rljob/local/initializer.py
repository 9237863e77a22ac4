"""Runs a job's initializer once: again only if what it is made of changed and nobody used what it made."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shutil
from pathlib import Path

import blake3

from rljob.api.explain import to_data
from rljob.api.models import RLJob
from rljob.local import processes, sweep
from rljob.local.directory import RunDirectory
from rljob.local.errors import Interrupted, RunError
from rljob.local.plan import common_environment, in_storage
from rljob.local.processes import Command, Interrupt

NAME = "initializer"
STAMP = "initializer.json"
MAX_PROGRAM_BYTES = 16 << 20


def check(job: RLJob, directory: RunDirectory) -> None:
    """Check what can be known before anything starts.

    Raises:
        RunError: with exit code 2: its program does not exist, or nothing makes a model that is not there.
    """
    initializer = job.spec.initializer
    if initializer is not None:
        program = in_storage(initializer.command[0], directory.path)
        if shutil.which(program, path=processes.search_path()) is None:
            raise RunError(
                f"spec.initializer.command[0]: there is no program {program!r}; install it, or correct it", 2
            )
    for i, model in enumerate(job.spec.models):
        made = initializer is not None and model.source.startswith("job://")
        path = Path(in_storage(model.source, directory.path))
        if not made and not path.is_dir():
            raise RunError(f"spec.models[{i}].source: there is no directory {path}; give one with a model", 2)


async def initialize(job: RLJob, directory: RunDirectory, interrupt: Interrupt) -> None:
    """Run the initializer unless the storage holds what it makes.

    Raises:
        RunError: it failed, or left no model.
        Interrupted: the run was stopped meanwhile.
    """
    initializer = job.spec.initializer
    if initializer is None:
        return
    key = content_key(job)
    stamp = directory.read_json(STAMP)
    if stamp.get("used") or stamp.get("key") == key:
        directory.tell(NAME, "cached")
        return
    command = Command(
        NAME,
        [in_storage(argument, directory.path) for argument in initializer.command],
        common_environment(directory.path) | {"RLJOB_SEED": str(job.spec.seed)},
    )
    await _run_once(command, directory, interrupt)
    for i, model in enumerate(job.spec.models):
        path = Path(in_storage(model.source, directory.path))
        if not path.is_dir():
            raise RunError(f"spec.models[{i}].source: the initializer left no directory {path}", log=_tail(directory))
    directory.write(STAMP, json.dumps({"key": key}).encode())


def mark_used(directory: RunDirectory) -> None:
    """Note that parts now work with what the initializer made: it is part of the run and never made anew."""
    stamp = directory.read_json(STAMP)
    if stamp and not stamp.get("used"):
        directory.write(STAMP, json.dumps(stamp | {"used": True}).encode())


def content_key(job: RLJob) -> str:
    """Return a digest of all that the initializer's result follows from: command, seed, job and program."""
    assert job.spec.initializer is not None
    data = to_data(job)["spec"]
    for field in ("training", "checkpoints", "failurePolicy"):  # may change under a run, and make no model
        data.pop(field)
    digest = blake3.blake3(json.dumps(data, sort_keys=True).encode())
    for argument in job.spec.initializer.command:
        source = _source(argument)
        if source is not None:
            digest.update(source.read_bytes())
    return digest.hexdigest()


def _source(argument: str) -> Path | None:
    """Return the file in which a program, or an argument that is a file, is written."""
    for script in importlib.metadata.entry_points(group="console_scripts", name=argument):
        spec = importlib.util.find_spec(script.module)
        if spec is not None and spec.origin is not None:
            return Path(spec.origin)
    found = shutil.which(argument, path=processes.search_path()) or argument
    path = Path(found)
    return path if path.is_file() and path.stat().st_size <= MAX_PROGRAM_BYTES else None


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
        code = 2 if process.returncode == 2 else 1
        how = processes.describe_exit(process.returncode)
        raise RunError(f"the initializer {how}; see the end of its log", code, _tail(directory))


def _tail(directory: RunDirectory) -> str:
    return processes.tail(processes.log_path(directory.path, NAME))
