"""`rljob` with a fake engine and a fake trainer; everything else is real.

    python -m e2e.fakes.rljob_run run job.yaml --run-dir DIR

FAKES, if set, names other modules to replace: {"rollout": "e2e.fakes.impatient_agent"}.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from unittest import mock

from e2e.fakes.harness import ROOT
from rljob.api.models import RLJob
from rljob.cli import run_control
from rljob.cli.main import main
from rljob.local import commands, job_checks, local_run
from rljob.local.commands import LocalContext
from rljob.local.component_supervisor import RestartBackoff
from rljob.local.processes import ProcessCommand

FAKES = {"rollout": "e2e.fakes.engine", "trainer": "e2e.fakes.trainer"} | json.loads(os.environ.get("FAKES", "{}"))


def planner(job: RLJob, here: LocalContext) -> list[ProcessCommand]:
    """Return the job's components with fakes among them."""
    return [_with_fake(command) for command in commands.components(job, here)]


def _with_fake(command: ProcessCommand) -> ProcessCommand:
    environment = command.environment | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    fake = FAKES.get(command.name.partition("-")[0])
    arguments = [sys.executable, "-m", fake] if fake is not None else command.arguments
    return replace(command, arguments=arguments, environment=environment)


def run_job(job, manifest, directory, screen):
    return local_run.run_job(job, manifest, directory, screen, planner, RestartBackoff(first=0.01, after_success=0.1))


if __name__ == "__main__":
    with (
        mock.patch.object(run_control, "run_job", run_job),
        mock.patch.object(job_checks, "CHECKED_COMPONENTS", ()),
        mock.patch.object(local_run, "POLL_SECONDS", 0.05),
        mock.patch.object(local_run, "draw_plot", lambda *_: ""),
    ):
        main()
