"""Every example manifest runs to completion; only engine and trainer are fakes."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_all_its_rewards_score(example: Path, tmp_path: Path) -> None:
    changes = ["spec.training.steps=4", "spec.training.promptsPerStep=4", "spec.evaluation.problems=8"]
    done = subprocess.run(
        [
            ROOT / "e2e" / "docs" / "bin" / "rljob", "run", example, "--no-screen", "--run-dir", tmp_path / "run",
            *(word for change in changes for word in ("--set", change)),
        ],
        cwd=ROOT,
        env=os.environ
        | {"PATH": f"{ROOT}/e2e/docs/bin:{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    status = json.loads((tmp_path / "run" / "status.json").read_bytes())
    assert status["state"] == "Succeeded" and status["progress"]["step"] == 4
    with contextlib.closing(sqlite3.connect(tmp_path / "run" / "ledger.sqlite")) as ledger:
        ends = dict(ledger.execute("SELECT state, COUNT(*) FROM samples GROUP BY state"))
    assert ends["trained"] == 4 * 4 * 8 and "failed" not in ends
    assert all(result["problems"] == 8 for result in status["evaluations"]) and status["evaluations"]
