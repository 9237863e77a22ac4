"""Every example manifest runs to completion; only engine and trainer are fakes."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from e2e.fakes.chat_server import completion

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
PATH = f"{ROOT}/e2e/docs/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_all_its_rewards_score(example: Path, tmp_path: Path) -> None:
    changes = ["spec.training.steps=4", "spec.training.promptsPerStep=4", "spec.evaluation.problems=8"]
    for pool in frozen_pools(example):  # the real process of a frozen pool, with a fake engine
        changes += [
            f"spec.rollouts[{pool['name']}].engine=e2e.fakes.judge_engine:JudgeEngine",
            f"spec.models[{pool['model']}].source=job://model",
        ]
    check_run(example, changes, tmp_path)
    for name in set(added_rewards(example)) - {reward["name"] for reward in judges(example)}:
        assert check_again(tmp_path / "run", name)["changed"] == 0
    for reward in judges(example):
        check_judge(tmp_path / "run", reward)


def frozen_pools(example: Path) -> list[dict[str, Any]]:
    """Return the pools with a model that is not trained."""
    pools = yaml.safe_load(example.read_text())["spec"]["rollouts"]
    return [pool for pool in pools if pool.get("model", "policy") != "policy"]


def judges(example: Path) -> list[dict[str, Any]]:
    """Return the rewards that ask a frozen pool for verdicts."""
    rewards = yaml.safe_load(example.read_text())["spec"].get("rewards", [])
    return [reward for reward in rewards if reward.get("builtin") == "judge" and "pool" in reward.get("config", {})]


def check_again(run: Path, reward: str) -> dict[str, Any]:
    """Score samples of a run once more by one of its rewards."""
    command = [ROOT / "e2e" / "docs" / "bin" / "rljob", "reward", "check", run, "--reward", reward, "--limit", "8"]
    done = subprocess.run(
        [*command, "-o", "json"], cwd=ROOT, env=os.environ | {"PATH": PATH}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["scored"] == 8 and all(sample["recorded"] is not None for sample in found["samples"])
    return found


class _Judge(http.server.BaseHTTPRequestHandler):
    """A server with OpenAI's API that is full of praise."""

    asked: ClassVar[list[tuple[str, str | None]]] = []
    """Model and token of each request."""

    def do_POST(self) -> None:
        model = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["model"]
        self.asked.append((model, self.headers["Authorization"]))
        body = json.dumps(completion("<score>10</score>")).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def check_judge(run: Path, reward: dict[str, Any]) -> None:
    """Score samples of a run, whose frozen pool is gone, by another server."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        pool = f"{reward['config']['pool']}=http://127.0.0.1:{server.server_port}/v1"
        command = ["reward", "check", run, "--reward", reward["name"], "--pool", pool, "--model", "large"]
        done = subprocess.run(
            [ROOT / "e2e" / "docs" / "bin" / "rljob", *command, "--limit", "3", "-o", "json"],
            cwd=ROOT,
            env=os.environ | {"PATH": PATH, "RLJOB_POOL_TOKEN": "secret"},
            capture_output=True,
            text=True,
        )
        server.shutdown()
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["scored"], found["errors"], found["mean_reward"]) == (3, 0, 1.0)
    assert _Judge.asked == [("large", "Bearer secret")] * 3


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
        env=os.environ | {"PATH": PATH},
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
