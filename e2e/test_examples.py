"""Every example manifest runs to completion; only engine and trainer are fakes."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_all_its_rewards_score(example: Path, tmp_path: Path) -> None:
    changes = ["spec.training.steps=4", "spec.training.promptsPerStep=4", "spec.evaluation.problems=8"]
    for pool in frozen_pools(example):  # the real process of a frozen pool, with a fake engine
        changes += [
            f"spec.rollouts[{pool['name']}].engine=e2e.fakes.judge_engine:JudgeEngine",
            f"spec.models[{pool['model']}].source=job://model",
        ]
    check_run(example, changes, tmp_path)


def frozen_pools(example: Path) -> list[dict[str, Any]]:
    """Return the pools with a model that is not trained."""
    pools = yaml.safe_load(example.read_text())["spec"]["rollouts"]
    return [pool for pool in pools if pool.get("model", "policy") != "policy"]


def added_rewards(example: Path) -> list[str]:
    """Return the rewards of tasks that have several."""
    tasks = yaml.safe_load(example.read_text())["spec"]["tasks"]
    return [
        name
        for task in tasks
        if "moreRewards" in task
        for name in (task["reward"], *(more["name"] for more in task["moreRewards"]))
    ]


def check_run(example: Path, changes: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [
            ROOT / "e2e" / "docs" / "bin" / "rljob", "run", example, "--no-screen", "--run-dir", tmp_path / "run",
            *(word for change in changes for word in ("--set", change)),
        ],
        cwd=ROOT,
        env=os.environ
        | {"PATH": f"{ROOT}/e2e/docs/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    status = json.loads((tmp_path / "run" / "status.json").read_bytes())
    assert status["state"] == "Succeeded" and status["progress"]["step"] == 4
    with contextlib.closing(sqlite3.connect(tmp_path / "run" / "ledger.sqlite")) as ledger:
        ends = dict(ledger.execute("SELECT state, COUNT(*) FROM samples GROUP BY state"))
        parts = {name for (text,) in ledger.execute("SELECT metrics FROM scores") for name in json.loads(text)}
    assert ends["trained"] == 4 * 4 * 8 and "failed" not in ends
    assert parts >= {f"reward/{name}" for name in added_rewards(example)}
    assert all(result["problems"] == 8 for result in status["evaluations"]) and status["evaluations"]
