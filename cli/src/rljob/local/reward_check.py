"""Scores recorded samples of a run again: starts the module of the runner that prints them, and that of the reward."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from rljob.api.explain import to_data
from rljob.api.load import override, validate
from rljob.api.models import RLJob
from rljob.local.errors import CliError
from rljob.local.run_directory import MANIFEST, RunDirectory
from rljob.protocol.score_messages import CheckedSample


@dataclass(frozen=True)
class PoolServer:
    """A server that stands for a frozen pool: its address without /v1, and the model's name; empty: the pool's."""

    pool: str
    url: str
    model: str = ""


def pool_server(given: str, model: str = "") -> PoolServer:
    """Return the server that ``NAME=URL`` names.

    Raises:
        CliError: it names none.
    """
    name, _, url = given.partition("=")
    try:
        found = urlsplit(url)
        valid = bool(name and found.scheme in ("http", "https") and found.hostname and found.port != 0)
    except ValueError:  # of brackets or of the port
        valid = False
    if not valid:
        raise CliError(f"--pool {given} is not NAME=URL, such as judge=http://127.0.0.1:8000/v1", 2)
    return PoolServer(name, url.rstrip("/").removesuffix("/v1"), model)


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


def check_pool(job: RLJob, name: str, server: PoolServer | None) -> None:
    """Check that there is a server for the frozen pool that reward ``name`` of ``job`` asks.

    Raises:
        CliError: there is none, or it stands for another pool.
    """
    pools = [pool.name for pool in job.spec.frozen_pools]
    if server is not None and server.pool not in pools:
        there = f"there are {', '.join(pools)}" if pools else "it has none"
        raise CliError(f"the run has no frozen pool {server.pool!r}; {there}", 2)
    asked = next(reward.config.get("pool") for reward in job.spec.rewards if reward.name == name)
    if asked is not None and (server is None or server.pool != asked):
        raise CliError(
            f"reward {name} asks the frozen pool {asked}, which runs only with its job; give the address of a server "
            f"with the same API: --pool {asked}=http://HOST:PORT/v1",
            2,
        )


def check_reward(
    run: RunDirectory, job: RLJob, name: str, limit: int, server: PoolServer | None = None
) -> list[CheckedSample]:
    """Return the newest samples of a run, scored by reward ``name`` of ``job``.

    ``server``: stands for a frozen pool; RLJOB_POOL_TOKEN, if it is set, is its token.

    Raises:
        CliError: with exit code 2: the data or the reward is invalid.
    """
    check_pool(job, name, server)
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
        samples = _recorded(limit, environment)
        scores = _scores(samples, environment | _variables(server))
    return [msgspec.json.decode(line, type=CheckedSample) for line in scores.splitlines()]


def _variables(server: PoolServer | None) -> dict[str, str]:
    """Return the variables by which a reward finds the server of a frozen pool."""
    if server is None:
        return {}
    return {"RLJOB_POOL_URLS": json.dumps({server.pool: [server.url]}), "RLJOB_POOL_MODEL": server.model}


def _recorded(limit: int, environment: Mapping[str, str]) -> bytes:
    """Return the newest samples of the run, one a line."""
    command = [sys.executable, "-m", "rljob.runner.recorded_samples", str(limit)]
    done = subprocess.run(command, env=environment, capture_output=True)
    if done.returncode:
        raise CliError(done.stderr.decode(errors="replace").strip(), 2)
    return done.stdout


def _scores(samples: bytes, environment: Mapping[str, str]) -> bytes:
    """Return the scores of samples, one a line. What the reward prints and logs goes to standard error at once."""
    done = subprocess.run(
        [sys.executable, "-m", "rljob.rewards.offline"], env=environment, input=samples, stdout=subprocess.PIPE
    )
    if done.returncode:
        ended = f"the process that scores ended with exit code {done.returncode}"
        raise CliError(done.stdout.decode(errors="replace").strip() or ended, 2)
    return done.stdout
