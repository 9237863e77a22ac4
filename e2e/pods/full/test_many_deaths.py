"""A job in pods whose pods are killed at random for minutes, and all at once."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.pods.checks import check_prompts
from e2e.pods.job import RESTRICTED, SMALL_MODEL, Job, quickstart
from e2e.pods.killing import kill_containers
from e2e.pods.operators import Operators
from tools.cluster.client import Object
from tools.cluster.node import Cluster

SECONDS = 240.0
KILLING_SECONDS = 240.0
PAUSE_SECONDS = (2.0, 25.0)
SEED = 6
PAST_ALL_STEPS = 100_000

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
def namespace(node: Cluster, installed: Any) -> Iterator[str]:
    name = node.namespace("deaths", RESTRICTED)
    yield name
    node.api.delete(f"/api/v1/namespaces/{name}")


def small(**spec: Any) -> Object:
    """Return a job of small batches with two engines."""
    given = quickstart()["spec"]
    return quickstart(
        **{
            "initializer": SMALL_MODEL,
            "training": given["training"] | {"steps": 40, "promptsPerStep": 8},
            "evaluation": {"problems": 32},
            "rollouts": [
                given["rollouts"][0]
                | {"kvCacheBytes": 64 << 20, "replicas": {"min": 1, "max": 2}}
                | {"autoscaling": {"provider": "none"}}
            ],
            "checkpoints": {"everySteps": 5, "keep": 2},
            "failurePolicy": {"maxRestarts": 200},
            **spec,
        }
    )


def complete(job: Job, seconds: float = SECONDS) -> None:
    """See a job to its end; its accounts are right."""
    job.until(lambda: job.condition("Complete")[0] == "True", seconds, "the job to be complete")
    check_prompts(job)
    report = job.audit()
    assert report["ok"] and report["finished"], report


def test_pods_killed_at_random_for_minutes_cost_time_and_nothing_else(node: Cluster, namespace: str) -> None:
    job = Job(node, namespace, small())
    job.apply()
    job.reaches(2, SECONDS)
    dice, deadline = random.Random(SEED), time.monotonic() + KILLING_SECONDS
    killed = 0
    while time.monotonic() < deadline and job.condition("Complete")[0] != "True":
        if pods := job.pods():
            with contextlib.suppress(RuntimeError):  # it had no process yet
                pod = dice.choice(pods)
                kill_containers(pod) if dice.random() < 0.5 else job.delete_pods(pod)
            killed += 1
        time.sleep(dice.uniform(*PAUSE_SECONDS))
    assert killed >= 5
    complete(job)


def test_all_pods_of_a_job_killed_at_once_come_back(node: Cluster, namespace: str) -> None:
    job = Job(node, namespace, small())
    job.apply()
    step = job.reaches(7, SECONDS)
    for pod in job.pods():
        kill_containers(pod)
    job.reaches(step + 2, SECONDS)
    complete(job)


def test_a_reward_pod_that_is_deleted_is_replaced_and_the_run_continues(node: Cluster, namespace: str) -> None:
    job = Job(node, namespace, small())
    job.apply()
    step = job.reaches(2, SECONDS)
    before, reward = job.lives("reward-sums"), job.pod("reward-sums")
    job.delete_pods(reward)
    job.has_pods("reward-sums", 1, SECONDS)
    job.reaches(step + 3, SECONDS)
    assert job.lives("reward-sums") == before
    complete(job)


@pytest.mark.alone
def test_a_job_ends_without_an_operator_and_is_tidied_up_when_there_is_one_again(node: Cluster, namespace: str) -> None:
    job, operators = Job(node, namespace, small()), Operators(node)
    job.apply()
    job.reaches(2, SECONDS)
    try:
        operators.scale(0)
        job.until(lambda: job.live()["state"] == "Succeeded", SECONDS, "the run to succeed by itself")
        assert job.condition("Complete")[0] != "True"
    finally:
        operators.scale(operators.usual)
    job.until(lambda: job.condition("Complete")[0] == "True", 60, "the job to be complete")
    job.until(lambda: {pod["metadata"]["labels"]["rljob.dev/role"] for pod in job.pods()} == {"coordinator"}, 60, "end")
    complete(job)
