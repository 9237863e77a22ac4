"""Checks the requirements of a job that no component checks: programs to start, and files that must exist."""

from __future__ import annotations

import ast
import itertools
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from rljob.api.model_address import is_remote
from rljob.api.models import RLJob
from rljob.api.resolve import IN_STORAGE, in_storage
from rljob.api.roles import Environment, Reward
from rljob.api.tasks import TaskData
from rljob.protocol.environment import search_path

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""Name of a model on the Hugging Face Hub."""


def problems(job: RLJob, storage: Path) -> Iterator[str]:
    """Yield one sentence for each missing program or file.

    Args:
        job: resolved, with absolute paths.
        storage: the run directory; it need not exist yet.
    """
    if job.spec.initializer is not None:
        yield from _program("spec.initializer.command[0]", job.spec.initializer.command[0], storage)
    lists: dict[str, Sequence[Reward | Environment]] = {
        "rewards": job.spec.rewards,
        "environments": job.spec.environments,
    }
    for name, services in lists.items():
        for i, service in enumerate(services):
            if service.local is not None:
                field = f"spec.{name}[{i}].local.command"
                yield from _program(f"{field}[0]", service.local.command[0], storage)
                yield from _script(field, service.local.command, storage)
    for i, model in enumerate(job.spec.models):
        path = Path(in_storage(model.source, storage))
        if not (is_remote(model.source) or path.is_dir() or _may_be_created(job, model.source)):
            yield f"spec.models[{i}].source: there is no directory {path}; {_remedy_without_model(path)}"
    for i, task in enumerate(job.spec.tasks):
        for field, source in _files(task.data):
            path = Path(in_storage(source, storage))
            if source.startswith(IN_STORAGE) and not (path.exists() or _may_be_created(job, source)):
                yield f"spec.tasks[{i}].data.{field}: there is no {path}, and no initializer creates it; correct it"


def _remedy_without_model(path: Path) -> str:
    """Return the remedy for a missing model; ``path`` may be the name of a model on the Hugging Face Hub."""
    name = str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else ""
    if not HUB_NAME.fullmatch(name) or path.parent.exists():
        return "give one with a model"
    return f"for the model of the Hugging Face Hub write hf://{name}, or give a directory with a model"


def _may_be_created(job: RLJob, source: str) -> bool:
    """Return whether the initializer may create ``source``."""
    return job.spec.initializer is not None and source.startswith(IN_STORAGE)


def _program(field: str, argument: str, storage: Path) -> Iterator[str]:
    program = in_storage(argument, storage)
    if shutil.which(program, path=search_path()) is None:
        what = "is not executable" if os.path.isfile(program) else "does not exist"
        yield f"{field}: {program!r} {what}; install it, or correct it"


def _script(field: str, command: Sequence[str], storage: Path) -> Iterator[str]:
    """Check the Python file that a command runs: ``python reward.py``, or ``./reward.py``."""
    first = Path(command[0]).name.startswith("python")
    options = itertools.takewhile(lambda argument: argument not in ("-c", "-m"), command[1:] if first else command[:1])
    place, argument = next(
        ((i, argument) for i, argument in enumerate(options, first) if argument.endswith(".py")), (0, None)
    )
    if argument is None:
        return
    path = Path(in_storage(argument, storage))
    if not path.is_file():
        if first and not argument.startswith(IN_STORAGE):  # the initializer may create it
            yield f"{field}: there is no file {str(path.absolute())!r}; correct {argument!r} in entry {place}"
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about the style of the script
            ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where, what = f" at line {line}" if line else "", error.args[0]
        yield f"{field}: {argument} is not valid Python{where}: {what}; correct it"


def _files(data: TaskData) -> Iterator[tuple[str, str]]:
    for name, table in (("jsonl", data.jsonl), ("parquet", data.parquet)):
        if table is not None:
            yield f"{name}.path", table.path
            if table.held_out_path is not None:
                yield f"{name}.heldOutPath", table.held_out_path
    if data.datasets is not None:
        yield "datasets.path", data.datasets.path
