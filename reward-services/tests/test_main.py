"""The service as a process. Only these tests wait for the import of reasoning-gym."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from rljob.api.models import RLJob
from rljob.rewards import sdk
from rljob.rewards.main import serve_function

SPEC = {
    "models": [{"name": "policy", "source": "job://model"}],
    "training": {"steps": 1},
    "tasks": [{"name": "sums", "data": {"reasoningGym": {"dataset": "chain_sum"}}, "reward": "right"}],
    "rewards": [
        {"name": "right", "builtin": "reasoning_gym", "processes": 2},
        {"name": "own", "local": {"command": ["python", "examples/rewards/length.py"]}, "timeoutSeconds": 2},
    ],
    "rollouts": [{"name": "main"}],
}


EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "rewards" / "length.py"


def start(
    directory: Path, name: str, port: int = 1, program: Sequence[str] = ("-m", "rljob.rewards.main"), **variables: str
) -> subprocess.Popen[str]:
    job = RLJob.model_validate({"metadata": {"name": "test"}, "spec": SPEC})
    (directory / "job.json").write_text(job.model_dump_json(by_alias=True))
    environment = {
        **os.environ,
        "RLJOB_JOB": str(directory / "job.json"),
        "RLJOB_STORAGE": str(directory),
        "RLJOB_NAME": name,
        "RLJOB_LISTEN": f"127.0.0.1:{port}",
        **variables,
    }
    command = [sys.executable, "-W", "ignore", *program]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def wait_until(service: subprocess.Popen[str], text: str) -> None:
    """Return when the service has logged ``text``."""
    assert service.stderr is not None
    for line in service.stderr:
        if text in line:
            return
    pytest.fail(f"the service ended with exit code {service.wait()}")


def test_the_service_scores_and_ends_its_workers(tmp_path, unused_tcp_port):
    service = start(tmp_path, "right", unused_tcp_port)
    try:
        wait_until(service, "serving at")
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
        assert service.wait(60) == 0
        assert sorted(select.select(workers, [], [], 0)[0]) == sorted(workers)
    finally:
        service.kill()
        service.communicate()


def test_a_name_that_is_not_a_reward_of_the_job_is_an_error(tmp_path):
    service = start(tmp_path, "wrong")
    _, errors = service.communicate(timeout=100)
    assert service.returncode == 2
    assert "RLJOB_NAME is 'wrong', which is not a reward of the job; name one of them" in errors


def test_the_example_program_serves_its_function(tmp_path, unused_tcp_port):
    listen = f":{unused_tcp_port}"  # as in a pod, which may have only an IPv4 or only an IPv6 address
    service = start(tmp_path, "own", program=[str(EXAMPLE)], RLJOB_LISTEN=listen, RLJOB_TOKEN="secret")
    try:
        wait_until(service, "serving at")
        item = {"task": "sums", "prompt": "", "finish": "stop", "problem": {"answer": "7"}}
        items = [{**item, "sample": f"g0.{i}", "completion": f"<answer>{i}</answer>"} for i in (7, 8)]
        items += [{**item, "sample": "g0.9", "completion": "", "problem": {}}]
        url, body = f"http://127.0.0.1:{unused_tcp_port}/v1/score", json.dumps({"items": items})
        assert httpx.post(url, content=body).status_code == 401
        answer = httpx.post(url, content=body, headers={"Authorization": "Bearer secret"})
        assert httpx.get(f"http://[::1]:{unused_tcp_port}/readyz").status_code == 200
        right, wrong, broken = answer.json()["scores"]
        assert (right["reward"], wrong["reward"]) == (pytest.approx(0.82), pytest.approx(-0.18))
        assert broken["error"] == "reward own raised KeyError: 'answer'"
        service.send_signal(signal.SIGTERM)
        assert service.wait(60) == 0
    finally:
        service.kill()
        service.communicate()


SLOW = """
import pathlib, time
from rljob.rewards.sdk import serve
here = pathlib.Path(__file__).parent
def reward(completion):
    (here / "begun").touch()
    while not (here / "go").exists():
        time.sleep(0.01)
    return 1.0
serve(reward)
"""


@pytest.mark.parametrize("pod", ["", "sums-reward-own-x"])
def test_after_sigterm_a_service_in_a_pod_finishes_received_samples(tmp_path, unused_tcp_port, pod):
    """On one machine the service ends at once; the runner repeats the request after the next start."""
    (tmp_path / "slow.py").write_text(SLOW)
    service = start(tmp_path, "own", unused_tcp_port, [str(tmp_path / "slow.py")], RLJOB_INSTANCE=pod)
    try:
        wait_until(service, "serving at")
        item = {"sample": "g0.0", "task": "sums", "prompt": "", "finish": "stop", "problem": {}, "completion": ""}
        with ThreadPoolExecutor(1) as asker:
            url = f"http://127.0.0.1:{unused_tcp_port}/v1/score"
            asked = asker.submit(httpx.post, url, content=json.dumps({"items": [item]}), timeout=100)
            while not (tmp_path / "begun").exists():
                time.sleep(0.01)
            service.send_signal(signal.SIGTERM)
            wait_until(service, "received SIGTERM")
            if pod:
                (tmp_path / "go").touch()
            assert service.wait(60) == 0
            if pod:
                assert [score["reward"] for score in asked.result().json()["scores"]] == [1.0]
            else:
                assert asked.exception() is not None or asked.result().status_code >= 500
    finally:
        service.kill()
        service.communicate()


def test_a_function_is_served_by_one_name(monkeypatch, tmp_path, unused_tcp_port):
    """The kinds of its errors are found by the name in their sentences."""
    served = []
    (tmp_path / "served_by_name.py").write_text("def reward(completion): return 1.0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sdk.RewardServer, "serve_until_signal", lambda self: served.append(self))
    monkeypatch.setattr(sdk, "adopt_orphans", lambda: None)
    serve_function("served_by_name:reward", f"127.0.0.1:{unused_tcp_port}", 1, 10.0)
    (server,) = served
    assert server.pool.name == "served_by_name:reward"
