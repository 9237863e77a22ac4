"""The service as a process: the one test here that waits for reasoning-gym's import."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from rljob.api.models import RLJob

SPEC = {
    "models": [{"name": "policy", "source": "job://model"}],
    "training": {"steps": 1},
    "tasks": [{"name": "sums", "data": {"reasoningGym": {"dataset": "chain_sum"}}, "reward": "right"}],
    "rewards": [{"name": "right", "builtin": "reasoning_gym", "processes": 2}],
    "rollouts": [{"name": "main"}],
}


def start(directory: Path, name: str, port: int = 1) -> subprocess.Popen[str]:
    job = RLJob.model_validate({"metadata": {"name": "test"}, "spec": SPEC})
    (directory / "job.json").write_text(job.model_dump_json(by_alias=True))
    environment = {
        **os.environ,
        "RLJOB_JOB": str(directory / "job.json"),
        "RLJOB_STORAGE": str(directory),
        "RLJOB_NAME": name,
        "RLJOB_LISTEN": f"127.0.0.1:{port}",
    }
    command = [sys.executable, "-W", "ignore", "-m", "rljob.rewards.main"]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def wait_until_listening(service: subprocess.Popen[str]) -> None:
    assert service.stderr is not None
    for line in service.stderr:
        if "Uvicorn running" in line:
            return
    pytest.fail(f"the service ended with exit code {service.wait()}")


def test_the_service_scores_and_leaves_nothing_behind(tmp_path, unused_tcp_port):
    service = start(tmp_path, "right", unused_tcp_port)
    try:
        wait_until_listening(service)
        url = f"http://127.0.0.1:{unused_tcp_port}"
        assert httpx.get(f"{url}/readyz").status_code == 200
        problem = {"question": "1 + 1 =", "answer": "2", "metadata": {"source_dataset": "chain_sum"}}
        item = {"sample": "g0.0", "task": "sums", "prompt": "", "finish": "stop", "problem": problem}
        items = [{**item, "completion": f"<answer>{answer}</answer>"} for answer in (2, 3)]
        answer = httpx.post(f"{url}/v1/score", content=json.dumps({"items": items}))
        assert [(score["reward"], score["error"]) for score in answer.json()["scores"]] == [(1.0, ""), (0.0, "")]

        workers = [os.pidfd_open(child.pid) for child in psutil.Process(service.pid).children()]
        assert len(workers) == 2
        service.send_signal(signal.SIGTERM)
        started = time.monotonic()
        service.wait(10)
        assert time.monotonic() - started < 3
        assert sorted(select.select(workers, [], [], 0)[0]) == sorted(workers)
    finally:
        service.kill()
        service.communicate()


def test_a_name_that_is_no_reward_of_the_job_ends_the_service_with_a_sentence(tmp_path):
    service = start(tmp_path, "wrong")
    _, told = service.communicate(timeout=30)
    assert service.returncode == 2
    assert "RLJOB_NAME is 'wrong', which is no reward of the job; name one of them" in told
