"""Scores recorded samples of a run again: starts the module of the runner that prints them, and that of the reward."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from rljob.api.explain import to_data
from rljob.api.load import override, validate
from rljob.api.models import RLJob
from rljob.local.errors import CliError
from rljob.local.run_directory import MANIFEST, RunDirectory
from rljob.protocol.score_messages import CheckedSample


def checked_job(job: RLJob, name: str | None, function: str | None, overrides: list[str]) -> tuple[RLJob, str]:
    """Return the job whose reward is checked, and the name of the reward.

    Args:
        job: of the run.
        name: of the reward; None: the only one.
        function: takes the place of the reward's scorer; None: the scorer of the run.
        overrides: each PATH=VALUE.

    Raises:
        CliError: there is no such reward, or several.
        ManifestError: the reward or an override is invalid.
    """
    names = [reward.name for reward in job.spec.rewards]
    if not names:
        raise CliError("the run has no rewards: its environments give them; there is nothing to check", 2)
    if name is None and len(names) > 1:
        raise CliError(f"the run has the rewards {', '.join(names)}; name one with --reward", 2)
    name = name or names[0]
    if name not in names:
        raise CliError(f"the run has no reward {name!r}; there are {', '.join(names)}", 2)
    data = to_data(job)
    reward = data["spec"]["rewards"][names.index(name)]
    if function is not None:
        for form in ("builtin", "url", "local", "template"):
            reward.pop(form, None)
        reward |= {"function": function, "config": {}}
    for entry in overrides:
        override(data, entry)
    found = validate(data)
    if not found.spec.rewards[names.index(name)].served_by_rljob:
        raise CliError(f"reward {name} is a program of its own; give its function with --function module:attribute", 2)
    return found, name


def check_reward(run: RunDirectory, job: RLJob, name: str, limit: int) -> list[CheckedSample]:
    """Return the newest samples of a run, scored by reward ``name`` of ``job``.

    Raises:
        CliError: with exit code 2: the data or the reward is invalid.
    """
    with tempfile.TemporaryDirectory(prefix="rljob-reward-") as scratch:
        manifest = Path(scratch) / MANIFEST
        manifest.write_text(job.model_dump_json(by_alias=True))
        environment = os.environ | {
            "RLJOB_JOB": str(manifest),
            "RLJOB_STORAGE": str(run.path.resolve()),
            "RLJOB_NAME": name,
            "PYTHONHASHSEED": "0",  # of the rows of some reasoning-gym datasets
            "PYTHONWARNINGS": "ignore",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH", "")])),
        }
        samples = _output(["rljob.runner.recorded_samples", str(limit)], environment, b"")
        scores = _output(["rljob.rewards.offline"], environment, samples)
    return [msgspec.json.decode(line, type=CheckedSample) for line in scores.splitlines()]


def _output(module: list[str], environment: dict[str, str], given: bytes) -> bytes:
    done = subprocess.run([sys.executable, "-m", *module], env=environment, input=given, capture_output=True)
    if done.returncode:
        raise CliError(done.stderr.decode(errors="replace").strip(), 2)
    return done.stdout
