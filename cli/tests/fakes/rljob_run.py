"""`rljob run` with fake components: python rljob_run.py MANIFEST RUN_DIR COMPONENTS. COMPONENTS: JSON, name → acts."""

import json
import os
import sys
from unittest import mock

from rljob.cli import run_control
from rljob.cli.main import main
from rljob.local import commands, job_checks, local_run
from rljob.local.component_supervisor import RestartBackoff
from rljob.local.processes import ProcessCommand

FAKE = __file__.replace("rljob_run", "component")

manifest, directory, components = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])


def planner(job, here):
    environments = {command.name: command.environment for command in commands.components(job, here)}
    return [
        ProcessCommand(name, [sys.executable, "-I", "-S", FAKE, *acts], environments.get(name, {}))
        for name, acts in components.items()
    ]


def run_job(job, manifest, directory, screen):
    return local_run.run_job(
        job, manifest, directory, screen, planner=planner, backoff=RestartBackoff(first=0.01, after_success=0)
    )


with (
    mock.patch.object(sys, "argv", ["rljob", "run", manifest, "--run-dir", directory, *sys.argv[4:]]),
    mock.patch.object(run_control, "run_job", run_job),
    mock.patch.object(job_checks, "CHECKED_COMPONENTS", ()),
    mock.patch.object(local_run, "POLL_SECONDS", 0.02),
    mock.patch.object(local_run, "LAST_WORD_SECONDS", 1.0),
    mock.patch.object(local_run, "draw_plot", local_run.draw_plot if os.environ["FAKE_PLOT"] else lambda *_: ""),
):
    main()
