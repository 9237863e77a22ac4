"""`rljob` whose components connect through a proxy: python -m e2e.faults.through_proxy PROXY_URL run job.yaml ..."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from unittest import mock

from rljob.api.models import RLJob
from rljob.cli import run_control
from rljob.cli.main import main
from rljob.local import commands, local_run
from rljob.local.commands import LocalContext
from rljob.local.processes import ProcessCommand

PROXY = sys.argv.pop(1)


def planner(job: RLJob, here: LocalContext) -> list[ProcessCommand]:
    """Return the job's components, which connect to the proxy instead of the coordinator and the rewards."""
    rewards = {reward.name: f"{PROXY}/rewards/{reward.name}" for reward in job.spec.rewards}
    changed = {"RLJOB_COORDINATOR": PROXY, "RLJOB_REWARD_URLS": json.dumps(rewards)}
    return [
        replace(command, environment={name: changed.get(name, value) for name, value in command.environment.items()})
        for command in commands.components(job, here)
    ]


def run_job(job, manifest, directory, screen):
    return local_run.run_job(job, manifest, directory, screen, planner)


if __name__ == "__main__":
    os.environ["PYTHONWARNINGS"] = "ignore"
    with mock.patch.object(run_control, "run_job", run_job):
        main()
