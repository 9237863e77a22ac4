"""A user's own reward in its own container, which fails in every way; a second task has a reward of rljob."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from e2e.pods.job import IDLE_RESOURCES, RESTRICTED, SMALL_MODEL, Job, quickstart
from tools.cluster.client import Object
from tools.cluster.node import Cluster

START_SECONDS = 800.0
AWAY_SECONDS = 60.0
REPLACED_SECONDS = 240.0
PROGRAM = """
import http.server, json, os, pathlib, time

state = pathlib.Path("/state")

def taken(name):
    '''Return whether a fault is to happen now, once.'''
    try:
        (state / name).unlink()
    except FileNotFoundError:
        return False
    return True

class Reward(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        items = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["items"]
        (state / "served").touch()
        if taken("hang"):
            time.sleep(1000)
        if taken("crash"):
            os._exit(3)
        scores = [{"sample": item["sample"], "reward": float(len(item["completion"]) % 2)} for item in items]
        self.answer({"scores": [{}] * len(items) if taken("malformed") else scores})

    def do_GET(self):
        self.answer({})

    def answer(self, reply):
        body = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

while True:
    server = http.server.ThreadingHTTPServer(("", 8080), Reward)
    server.timeout = 0.2
    while not taken("away"):
        server.handle_request()
    server.server_close()
    time.sleep(60)
"""
"""Serves the protocol without the SDK. A file in /state makes one request fail, or the service leave for a minute; the
file ``served`` says that there was a request."""

pytestmark = pytest.mark.timeout(1500)


def manifest() -> Object:
    """Return the quickstart with a second task, whose reward is a container of the user's own."""
    spec = quickstart()["spec"]
    alive = {
        "exec": {"command": ["true"]},
        "tcpSocket": None,
    }  # the pod stays in the name of the service while it does not listen
    main = {
        "name": "main",
        "image": "PLACE",
        "command": ["python", "-c", PROGRAM],
        "resources": IDLE_RESOURCES,
        "readinessProbe": alive,
        "volumeMounts": [{"name": "state", "mountPath": "/state"}],
    }
    template = {"spec": {"containers": [main], "volumes": [{"name": "state", "emptyDir": {}}]}}
    body = quickstart(
        initializer=SMALL_MODEL,
        training=spec["training"] | {"steps": 400, "promptsPerStep": 8, "maxStaleness": 2},
        evaluation=None,
        tasks=[spec["tasks"][0], spec["tasks"][0] | {"name": "odd", "reward": "odd"}],
        # A request that hangs ends after twice this time for each sample at the pod, at most 128, and 30 s.
        rewards=[*spec["rewards"], {"name": "odd", "template": template, "timeoutSeconds": 0.5}],
    )
    body["metadata"]["name"] = "rewards"
    return body


@pytest.fixture(scope="module")
def job(node: Cluster, installed: Any) -> Iterator[Job]:
    """The job, from its beginning to its end."""
    body = manifest()
    odd = body["spec"]["rewards"][1]["template"]["spec"]["containers"][0]
    odd["image"] = installed.images["rewards"]  # any image with Python
    found = Job(node, node.namespace("rewards", RESTRICTED), body)
    found.apply()
    yield found
    node.api.delete(f"/api/v1/namespaces/{found.namespace}")


def fault(job: Job, name: str) -> None:
    """Let the user's reward fail."""
    job.kubectl("exec", job.pod("reward-odd")["metadata"]["name"], "--", "touch", f"/state/{name}")


def unscored(job: Job, task: str) -> int:
    """Return how many samples of a task are complete and wait for their score."""
    query = (
        "SELECT COUNT(*) AS n FROM samples JOIN groups ON groups.id = group_id WHERE state = 'admitted'"
        f" AND task = '{task}' AND EXISTS (SELECT 1 FROM completions WHERE sample = samples.id AND finish != 'abort')"
    )
    return int(job.ledger(query)[0]["n"])


def test_a_reward_of_a_user_scores_in_its_own_container(job: Job) -> None:
    job.reaches(2, START_SECONDS)
    scored = job.ledger(
        "SELECT DISTINCT task FROM samples JOIN groups ON groups.id = group_id WHERE reward IS NOT NULL"
    )
    assert {row["task"] for row in scored} == {"sums", "odd"}


@pytest.mark.parametrize("name", ["malformed", "crash", "hang"])
def test_a_reward_that_fails_once_loses_no_sample(job: Job, name: str) -> None:
    begun = job.step()
    fault(job, name)
    job.until(lambda: not exists(job, name), 120, "the fault to happen")
    job.reaches(begun + 3, REPLACED_SECONDS)
    check_samples(job)


def test_a_reward_that_is_unreachable_for_a_minute_loses_no_sample_and_delays_no_other_task(job: Job) -> None:
    begun = job.step()
    fault(job, "away")
    job.until(lambda: unscored(job, "odd") > 0, AWAY_SECONDS / 2, "samples that wait for the user's reward")
    job.until(lambda: unscored(job, "odd") > 0 and not unscored(job, "sums"), 10, "scores of the other task")
    job.reaches(begun + 5, REPLACED_SECONDS)
    check_samples(job)


def exists(job: Job, name: str) -> bool:
    """Return whether a fault has not happened yet. While the container starts again, the request fails: not yet."""
    listed = job.kubectl("exec", job.pod("reward-odd")["metadata"]["name"], "--", "ls", "/state")
    return name in listed.split()


def check_samples(job: Job) -> None:
    """No sample failed or was thrown away."""
    assert job.ledger("SELECT id, state, reason FROM samples WHERE state IN ('failed', 'expired')") == []
