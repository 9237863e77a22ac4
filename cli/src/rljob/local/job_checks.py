"""Checks all requirements of a job before anything is written: a rejected manifest changes no file.

First the quick checks (:mod:`rljob.local.environment_checks`, :mod:`rljob.local.capacity`), then the components:
each is started with ``--check`` in its planned environment and reports one line per problem.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rljob.api.gpu_names import VISIBLE
from rljob.api.models import RLJob
from rljob.api.resolve import resolve, with_absolute_paths
from rljob.local import capacity, environment_checks, field_support
from rljob.local.commands import LocalContext, components, servers, services
from rljob.local.errors import CliError
from rljob.local.gpu_assignment import kind_of
from rljob.local.processes import environment_of
from rljob.local.run_directory import MANIFEST, ROLES, RunDirectory
from rljob.protocol.exit_codes import CONFIGURATION_ERROR
from rljob.protocol.gpus import Gpu, find_gpus, nothing_selected
from rljob.protocol.startup import CHECK_REPORT

CHECKED_COMPONENTS = ("trainer", "rollout", "runner", "rewards", "environments")
"""Components that check themselves: ``python -m rljob.NAME.main --check``. `rewards` and `environments` only check
functions and builtins that need a package: validation and the runner check the requirements of other builtins."""
CHECK_SECONDS = 300.0
"""Of one component. The import of vLLM alone takes two minutes on a busy machine, or from a network file system."""
LAST_LINES = 15

Warn = Callable[[str], None]


def prepare(job: RLJob, directory: RunDirectory, warn: Warn) -> RLJob:
    """Return ``job`` resolved, with absolute paths, after all checks passed.

    Args:
        job: as loaded.
        directory: of its run.
        warn: called with each warning.

    Raises:
        CliError: with exit code 2 and all errors, one per line; nothing was written.
    """
    gpus = find_gpus()
    if not gpus and (note := nothing_selected()):
        warn(note)
    job = with_absolute_paths(resolve(job, kind_of(gpus)), Path.cwd())
    directory.check(job)
    _raise_if_any([*field_support.errors(job, gpus), *environment_checks.problems(job, directory.path)])
    for note in [*field_support.warnings(job), *capacity.check(job, directory.path, gpus)]:
        warn(note)
    _raise_if_any(check_components(job, directory.path, gpus))
    return job


def _raise_if_any(problems: list[str]) -> None:
    if problems:
        raise CliError("\n".join(dict.fromkeys(problems)), 2)  # several components may report the same


def check_components(job: RLJob, storage: Path, gpus: tuple[Gpu, ...] = ()) -> list[str]:
    """Return the errors that the components of a resolved job report.

    Args:
        job: resolved, with absolute paths.
        storage: the run directory.
        gpus: of this machine.

    Raises:
        CliError: a check crashed or timed out.
    """
    with tempfile.TemporaryDirectory(prefix="rljob-check-") as scratch, contextlib.ExitStack() as running:
        manifest = Path(scratch) / MANIFEST
        manifest.write_text(job.model_dump_json(by_alias=True))
        checks = [
            running.enter_context(_started_check(component, environment | {"RLJOB_JOB": str(manifest)}, report))
            for i, (component, environment) in enumerate(_planned_checks(job, storage, gpus))
            for report in [Path(scratch) / f"report-{i}"]
        ]
        return [problem for check in checks for problem in _report_of(check)]


def _planned_checks(job: RLJob, storage: Path, gpus: tuple[Gpu, ...] = ()) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield component and environment of each check: the planned environment of its process.

    Pools and rewards are checked together, without RLJOB_NAME, if their environments are the same. Engines of a pool
    differ in their GPUs only: the first one is checked.
    """
    context = LocalContext(storage, dict.fromkeys(servers(job), 0), dict.fromkeys(ROLES, ""), gpus)
    functions = {f"{kind}-{each.name}": f"{kind}s" for kind, each in services(job) if each.checked_by_service}
    planned: dict[str, dict[str, dict[str, str]]] = {component: {} for component in CHECKED_COMPONENTS}
    for command in components(job, context):
        component = functions.get(command.name, command.name.partition("-")[0])
        environment = environment_of(command) | {"PYTHONWARNINGS": "ignore"}
        if component in planned:
            planned[component].setdefault(_kind(environment), environment)
    for component, environments in planned.items():
        unnamed = [_without_name(environment) for environment in environments.values()]
        same = len({_kind(environment) for environment in unnamed}) == 1
        yield from ((component, environment) for environment in (unnamed[:1] if same else environments.values()))


def _without_name(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name != "RLJOB_NAME"}


def _kind(environment: dict[str, str]) -> str:
    """Return a key that is the same for environments with the same checks: of the GPUs only the number matters."""
    counted = environment | {VISIBLE: str(environment.get(VISIBLE, "").count(",") + bool(environment.get(VISIBLE)))}
    return json.dumps(counted, sort_keys=True)


@dataclass(frozen=True)
class _Check:
    component: str
    process: subprocess.Popen[str]
    report: Path


@contextlib.contextmanager
def _started_check(component: str, environment: dict[str, str], report: Path) -> Iterator[_Check]:
    command = [sys.executable, "-m", f"rljob.{component}.main", "--check"]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment | {CHECK_REPORT: str(report)},
    ) as process:
        try:
            yield _Check(component, process, report)
        finally:
            process.kill()  # the check has ended, or another check failed


def _report_of(check: _Check) -> list[str]:
    try:
        _, output = check.process.communicate(timeout=CHECK_SECONDS)
    except subprocess.TimeoutExpired:
        raise CliError(f"the check of {check.component} took more than {CHECK_SECONDS:.0f} s; try again") from None
    if check.process.returncode not in (0, CONFIGURATION_ERROR) or not check.report.exists():
        last = "\n".join(f"  {line}" for line in output.splitlines()[-LAST_LINES:])
        raise CliError(f"{check.component} could not be checked; its output", log=last)
    return check.report.read_text().splitlines()
