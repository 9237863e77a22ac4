"""The reward ``code`` as a service process: its layers in the log, a worker that is killed during a run, its end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from rljob.api.models import RLJob

FENCE = "```"


def start(directory: Path, port: int, config: dict[str, Any]) -> subprocess.Popen[str]:
    reward = {"name": "passes", "builtin": "code", "config": config, "timeoutSeconds": 6}
    spec = {
        "models": [{"name": "policy", "source": "job://model"}],
        "training": {"steps": 1},
        "tasks": [{"name": "sums", "data": {"jsonl": {"path": "rows.jsonl"}}, "reward": "passes"}],
        "rewards": [reward],
        "rollouts": [{"name": "main"}],
    }
    job = RLJob.model_validate({"metadata": {"name": "test"}, "spec": spec})
    (directory / "job.json").write_text(job.model_dump_json(by_alias=True))
    variables = {"RLJOB_JOB": str(directory / "job.json"), "RLJOB_STORAGE": str(directory), "RLJOB_NAME": "passes"}
    variables["RLJOB_LISTEN"] = f"127.0.0.1:{port}"
    command = [sys.executable, "-W", "ignore", "-m", "rljob.rewards.main"]
    return subprocess.Popen(command, env=os.environ | variables, stderr=subprocess.PIPE, text=True)


def score(port: int, program: str) -> tuple[float, str]:
    problem = {"tests": [{"input": "1", "output": "1"}]}
    item = {"sample": "g0.0", "task": "sums", "prompt": "", "finish": "stop", "problem": problem}
    item["completion"] = f"{FENCE}python\n{program}\n{FENCE}"
    reply = httpx.post(f"http://127.0.0.1:{port}/v1/score", json={"items": [item]}, timeout=60).json()["scores"][0]
    return reply["reward"], reply["error"]


def test_a_worker_that_is_killed_during_a_run_leaves_no_process_and_no_zombie(tmp_path, unused_tcp_port):
    service = start(tmp_path, unused_tcp_port, {"seconds": 30, "filesMebibytes": 1})
    try:
        log = ""
        while "serving at" not in log:
            line = service.stderr.readline()
            assert line, log
            log += line
        assert "code runs behind" in log and "limits; strongest layer: " in log and "weakest: seccomp" in log
        assert score(unused_tcp_port, "print(input())") == (1.0, "")
        alone = len(psutil.Process(service.pid).children(recursive=True))
        assert score(unused_tcp_port, "import time\ntime.sleep(50)")[1] == "reward passes took longer than 6 s"
        assert score(unused_tcp_port, "print(input())") == (1.0, "")
        wait_for(lambda: len(psutil.Process(service.pid).children(recursive=True)) == alone)
        service.terminate()
        assert service.wait(60) == 0
    finally:
        service.kill()
        service.communicate()


def test_a_missing_layer_ends_the_service_with_exit_code_2_and_its_name(tmp_path, unused_tcp_port, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    service = start(tmp_path, unused_tcp_port, {"layers": ["bubblewrap", "seccomp"]})
    _, errors = service.communicate(timeout=100)
    assert service.returncode == 2
    assert "config.layers demands bubblewrap, which is missing here: there is no program bwrap" in errors


def wait_for(condition: Any) -> None:
    end = time.monotonic() + 20
    while not condition():
        if time.monotonic() > end:
            pytest.fail("it does not happen")
        time.sleep(0.05)
