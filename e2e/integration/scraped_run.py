"""A run whose processes serve /metrics: everything is real but the engine and the trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.fakes.harness import ROOT
from e2e.fakes.model import write_model
from e2e.fakes.rljob_run import planner
from rljob.api.models import RLJob
from rljob.api.resolve import resolve
from rljob.local.commands import LocalContext, servers
from rljob.protocol.free_port import free_port

ROLES = ("trainer", "agent", "runner", "reward", "environment", "pool", "owner")
MANIFEST: dict[str, Any] = {
    "metadata": {"name": "sums", "namespace": "research"},
    "spec": {
        "models": [{"name": "policy", "source": "job://model"}],
        "training": {"steps": 100_000, "promptsPerStep": 4, "samplesPerPrompt": 4, "maxStaleness": 1},
        "algorithm": {"groupFilter": "none"},
        "evaluation": {"problems": 2, "everySteps": 20, "passAt": [1]},
        "tasks": [
            {
                "name": "sums",
                "data": {"reasoningGym": {"dataset": "chain_sum"}},
                "reward": "exact",
                "sampling": {"maxTokens": 8},
            },
            {
                "name": "lake",
                "data": {"seeds": {}},
                "loop": "environment",
                "environment": {"name": "lake", "maxTurns": 4, "observation": "{observation}>"},
                "prompt": "{observation}>",
                "sampling": {"maxTokens": 2},
            },
        ],
        "rewards": [{"name": "exact", "builtin": "reasoning_gym"}],
        "environments": [{"name": "lake", "builtin": "frozen_lake"}],
        "rollouts": [{"name": "main"}],
    },
}


@dataclass(frozen=True)
class ScrapedRun:
    """A running job. ``addresses``: role → host:port of its /metrics."""

    job: RLJob
    addresses: dict[str, str]


@contextmanager
def scraped_run(storage: Path) -> Iterator[ScrapedRun]:
    """Run the job until the block ends; the processes log to NAME.log in ``storage``."""
    job = resolve(RLJob.model_validate(MANIFEST), "cpu")
    write_model(storage / "model")
    (storage / "job.json").write_text(job.model_dump_json(by_alias=True))
    tokens = {role: f"{role}-secret" for role in ROLES}
    (storage / "tokens.json").write_text(json.dumps(tokens))
    ports = {name: free_port() for name in servers(job)}
    processes = []
    try:
        for command in planner(job, LocalContext(storage, ports, tokens)):
            with (storage / f"{command.name}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, *command.arguments[1:]],
                        env=os.environ | command.environment,
                        cwd=ROOT,
                        stdout=log,
                        stderr=log,
                    )
                )
        yield ScrapedRun(job, {name: f"127.0.0.1:{port}" for name, port in ports.items()})
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
