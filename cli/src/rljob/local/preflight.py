"""Looks at everything a job needs before anything is written: a manifest that is refused leaves no trace.

First what is quick to see (:mod:`rljob.local.surroundings`, :mod:`rljob.local.capacity`), then what the parts find:
each is started with ``--check`` and prints a sentence a line for everything that would keep it from starting.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from rljob.api.models import RLJob
from rljob.api.resolve import resolve, with_absolute_paths
from rljob.local import capacity, honours, surroundings
from rljob.local.directory import MANIFEST, RunDirectory
from rljob.local.errors import RunError
from rljob.local.plan import common_environment
from rljob.protocol.exit_codes import CONFIGURATION_ERROR

CHECKED_PARTS = ("trainer", "rollout", "runner")
"""Parts that check themselves: ``python -m rljob.PART.main --check``. A builtin reward needs nothing that validation
and the runner's check do not look at."""
CHECK_SECONDS = 120.0
LAST_LINES = 15

Warn = Callable[[str], None]


def prepare(job: RLJob, directory: RunDirectory, warn: Warn) -> RLJob:
    """Return ``job`` resolved, with absolute paths, once its surroundings are found to be right.

    Args:
        job: as loaded.
        directory: where it is to run.
        warn: called with a sentence on what has no effect, or may go wrong.

    Raises:
        RunError: with exit code 2 and everything that is wrong, a sentence a line; nothing was written.
    """
    job = with_absolute_paths(resolve(job), Path.cwd())
    directory.check(job)
    _refuse([*honours.refusals(job), *surroundings.problems(job, directory.path)])
    for note in [*honours.notes(job), *capacity.check(job, directory.path)]:
        warn(note)
    _refuse(check_parts(job, directory.path))
    return job


def _refuse(problems: list[str]) -> None:
    if problems:
        raise RunError("\n".join(dict.fromkeys(problems)), 2)  # several parts may find the same


def check_parts(job: RLJob, storage: Path) -> list[str]:
    """Return what the parts of a resolved job find wrong, a sentence each.

    Raises:
        RunError: one could not look.
    """
    with tempfile.TemporaryDirectory(prefix="rljob-check-") as scratch, contextlib.ExitStack() as running:
        (Path(scratch) / MANIFEST).write_text(job.model_dump_json(by_alias=True))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RLJOB_")}
        environment |= common_environment(storage) | {"RLJOB_JOB": str(Path(scratch) / MANIFEST)}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        checks = [(part, running.enter_context(_check(part, environment))) for part in CHECKED_PARTS]
        return [problem for part, process in checks for problem in _found(part, process)]


@contextlib.contextmanager
def _check(part: str, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", f"rljob.{part}.main", "--check"]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()  # it is done, or nobody waits for it any more


def _found(part: str, process: subprocess.Popen[str]) -> list[str]:
    try:
        _, said = process.communicate(timeout=CHECK_SECONDS)
    except subprocess.TimeoutExpired:
        raise RunError(f"the check of {part} took more than {CHECK_SECONDS:.0f} s; try again") from None
    if process.returncode not in (0, CONFIGURATION_ERROR):
        last = "\n".join(f"  {line}" for line in said.splitlines()[-LAST_LINES:])
        raise RunError(f"{part} could not be checked; it said", log=last)
    return said.splitlines() if process.returncode else []
