"""Checks everything that a job needs before anything is written: a refused manifest leaves no trace.

First the quick checks (:mod:`rljob.local.environment_checks`, :mod:`rljob.local.capacity`), then the components:
each is started with ``--check`` and prints one line for each reason why it could not start.
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
from rljob.local import capacity, environment_checks, field_support
from rljob.local.commands import common_environment
from rljob.local.errors import CliError
from rljob.local.run_directory import MANIFEST, RunDirectory
from rljob.protocol.exit_codes import CONFIGURATION_ERROR

CHECKED_COMPONENTS = ("trainer", "rollout", "runner", "rewards")
"""Components that check themselves: ``python -m rljob.NAME.main --check``. `rewards` only checks functions: validation
and the runner check everything that a builtin reward needs."""
CHECK_SECONDS = 120.0
LAST_LINES = 15

Warn = Callable[[str], None]


def prepare(job: RLJob, directory: RunDirectory, warn: Warn) -> RLJob:
    """Return ``job`` resolved, with absolute paths, after all checks passed.

    Args:
        job: as loaded.
        directory: where it will run.
        warn: called with each warning.

    Raises:
        CliError: with exit code 2 and all errors, one per line; nothing was written.
    """
    job = with_absolute_paths(resolve(job), Path.cwd())
    directory.check(job)
    _refuse([*field_support.errors(job), *environment_checks.problems(job, directory.path)])
    for note in [*field_support.warnings(job), *capacity.check(job, directory.path)]:
        warn(note)
    _refuse(check_components(job, directory.path))
    return job


def _refuse(problems: list[str]) -> None:
    if problems:
        raise CliError("\n".join(dict.fromkeys(problems)), 2)  # several components may report the same


def check_components(job: RLJob, storage: Path) -> list[str]:
    """Return the errors that the components of a resolved job find.

    Raises:
        CliError: a check could not be done.
    """
    with tempfile.TemporaryDirectory(prefix="rljob-check-") as scratch, contextlib.ExitStack() as running:
        (Path(scratch) / MANIFEST).write_text(job.model_dump_json(by_alias=True))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RLJOB_")}
        environment |= common_environment(storage) | {"RLJOB_JOB": str(Path(scratch) / MANIFEST)}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        functions = any(reward.function is not None for reward in job.spec.rewards)
        components = [component for component in CHECKED_COMPONENTS if component != "rewards" or functions]
        checks = [(component, running.enter_context(_check(component, environment))) for component in components]
        return [problem for component, process in checks for problem in _found(component, process)]


@contextlib.contextmanager
def _check(component: str, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", f"rljob.{component}.main", "--check"]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()  # it has ended, or its result is no longer needed


def _found(component: str, process: subprocess.Popen[str]) -> list[str]:
    try:
        _, output = process.communicate(timeout=CHECK_SECONDS)
    except subprocess.TimeoutExpired:
        raise CliError(f"the check of {component} took more than {CHECK_SECONDS:.0f} s; try again") from None
    if process.returncode not in (0, CONFIGURATION_ERROR):
        last = "\n".join(f"  {line}" for line in output.splitlines()[-LAST_LINES:])
        raise CliError(f"{component} could not be checked; its output", log=last)
    return output.splitlines() if process.returncode else []
