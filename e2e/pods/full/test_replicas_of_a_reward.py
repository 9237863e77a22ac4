"""A user's reward with two pods: both score, one of them is killed and one deleted, and no sample is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from e2e.pods.full.test_rewards_of_users import REPLACED_SECONDS, START_SECONDS, check_samples, manifest
from e2e.pods.job import RESTRICTED, Job
from e2e.pods.killing import kill_containers
from tools.cluster.client import Object
from tools.cluster.node import Cluster

ROLE = "reward-odd"

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def job(node: Cluster, installed: Any) -> Iterator[Job]:
    """The job, from its beginning to its end."""
    body = manifest()
    body["metadata"]["name"] = "replicas"
    odd = body["spec"]["rewards"][1]
    odd["replicas"] = {"min": 2}
    odd["template"]["spec"]["containers"][0]["image"] = installed.images["rewards"]  # any image with Python
    found = Job(node, node.namespace("replicas", RESTRICTED), body)
    found.apply()
    yield found
    node.api.delete(f"/api/v1/namespaces/{found.namespace}")


def served(job: Job, pod: Object) -> bool:
    """Return whether a pod of the reward has had a request since its container started."""
    return "served" in job.kubectl("exec", pod["metadata"]["name"], "--", "ls", "/state").split()


def both_serve(job: Job) -> None:
    """Wait until there are two pods, and both have had requests."""
    for pod in job.has_pods(ROLE, 2, REPLACED_SECONDS):
        job.until(lambda pod=pod: served(job, pod), REPLACED_SECONDS, f"a request to {pod['metadata']['name']}")


def test_both_pods_of_a_reward_score(job: Job) -> None:
    job.reaches(1, START_SECONDS)
    both_serve(job)


def test_a_pod_that_is_killed_loses_no_sample(job: Job) -> None:
    victim = job.has_pods(ROLE, 2, REPLACED_SECONDS)[0]
    begun = job.step()
    job.kubectl("exec", victim["metadata"]["name"], "--", "rm", "-f", "/state/served")
    kill_containers(victim)
    job.reaches(begun + 3, REPLACED_SECONDS)
    check_samples(job)
    both_serve(job)


def test_a_pod_that_is_deleted_loses_no_sample_and_the_new_one_serves(job: Job) -> None:
    pods = job.has_pods(ROLE, 2, REPLACED_SECONDS)
    begun = job.step()
    job.delete_pods(pods[0])
    job.reaches(begun + 3, REPLACED_SECONDS)
    check_samples(job)
    both_serve(job)
    assert {pod["metadata"]["uid"] for pod in job.pods(ROLE)} != {pod["metadata"]["uid"] for pod in pods}
