"""A model acts in an environment whose service has two pods; one of them is deleted during the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.pods.job import MODEL, RESTRICTED, Job
from tools.cluster.client import Object
from tools.cluster.node import Cluster

EXAMPLE = Path(__file__).parents[3] / "examples" / "frozen_lake.yaml"
START_SECONDS = 400.0
SECONDS = 240.0
SMALL_MODEL = MODEL.replace("working_steps=200, bare_steps=20", "working_steps=60, bare_steps=0, batch=16")
"""Warmed up on few scripted episodes, which the built-in game in the trainer's image plays."""
SESSIONS = """
import re, urllib.request
text = urllib.request.urlopen("http://127.0.0.1:8080/metrics").read().decode()
print(int(float(re.search(r"^rljob_environment_episodes_total (\\S+)$", text, re.M)[1])))
"""

pytestmark = pytest.mark.timeout(1200)


def manifest() -> Object:
    """Return the example with a small model, small batches and two pods of the environment."""
    body: Object = yaml.safe_load(EXAMPLE.read_text())
    spec = body["spec"]
    spec["initializer"] = {"command": ["python", "-c", SMALL_MODEL, "job://model"]}
    spec["training"] |= {"steps": 12, "promptsPerStep": 4, "samplesPerPrompt": 4}
    spec["evaluation"] = None
    spec["environments"][0]["replicas"] = {"min": 2}
    spec["rollouts"][0]["kvCacheBytes"] = 64 << 20
    spec["checkpoints"] = {"everySteps": 6, "keep": 1}
    return body


@pytest.fixture
def job(node: Cluster, installed: Any) -> Iterator[Job]:
    found = Job(node, node.namespace("lake", RESTRICTED), manifest())
    found.apply()
    yield found
    node.api.delete(f"/api/v1/namespaces/{found.namespace}")


def episodes(job: Job, pod: Object) -> int:
    """Return how many episodes a pod of the environment has started."""
    return int(job.kubectl("exec", pod["metadata"]["name"], "--", "python", "-c", SESSIONS))


def test_episodes_are_shared_by_the_pods_and_a_pod_that_is_deleted_costs_its_episodes_only(job: Job) -> None:
    step = job.reaches(2, START_SECONDS)
    pods = job.has_pods("environment-lake", 2, SECONDS)
    assert job.status()["ready"]["environment"] == "2/2"
    assert all(episodes(job, pod) > 0 for pod in pods)
    before = job.lives("environment-lake")
    job.delete_pods(pods[0])
    job.reaches(step + 2, SECONDS)
    job.has_pods("environment-lake", 2, SECONDS)
    job.until(lambda: job.condition("Complete")[0] == "True", SECONDS, "the job to be complete")
    now = job.lives("environment-lake")  # of the roles that remain after the end
    assert now.items() <= before.items()
    failed = job.ledger("SELECT DISTINCT reason FROM samples WHERE state = 'failed'")
    assert all("environment lake" in row["reason"] for row in failed), failed
    turns = job.ledger("SELECT COUNT(*) AS n FROM completions WHERE turn > 0")
    assert turns[0]["n"] > 0
    report = job.audit()
    assert report["ok"] and report["finished"], report
