"""What a cluster may do to a job besides killing its pods: memory, taints, images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from e2e.pods.full.test_many_deaths import complete, small
from e2e.pods.job import RESTRICTED, Job, quickstart
from e2e.pods.killing import kill_containers
from tools.cluster.node import Cluster

SECONDS = 240.0
TAINT = "rljob.dev/test"

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def namespace(node: Cluster, installed: Any) -> Iterator[str]:
    name = node.namespace("bad-days", RESTRICTED)
    yield name
    node.api.delete(f"/api/v1/namespaces/{name}")


def with_main(role: dict[str, Any], **container: Any) -> dict[str, Any]:
    """Return a role of the manifest with fields of its main container."""
    return role | {"template": {"spec": {"containers": [{"name": "main", **container}]}}}


def test_an_engine_with_too_little_memory_ends_the_job_with_words_that_say_so(node: Cluster, namespace: str) -> None:
    rollout = with_main(quickstart()["spec"]["rollouts"][0], resources={"limits": {"memory": "400Mi"}})
    job = Job(node, namespace, small(rollouts=[rollout], failurePolicy={"maxRestarts": 1}))
    job.apply()
    job.until(lambda: job.condition("Failed")[0] == "True", SECONDS, "Failed")
    told = str(job.condition("Failed")) + str(job.status()["roles"])
    assert "memory" in told.lower() or "OOMKilled" in told, told


@pytest.mark.alone
def test_a_taint_that_evicts_every_pod_costs_time_and_no_restart(node: Cluster, namespace: str) -> None:
    job, (name,) = Job(node, namespace, small()), node.nodes
    job.apply()
    step = job.reaches(7, SECONDS)
    before = job.lives()
    try:
        node.kubectl("taint", "node", name, f"{TAINT}=true:NoExecute")
        job.until(
            lambda: not any(pod["status"]["phase"] == "Running" for pod in job.pods()), 90, "all pods to be evicted"
        )
    finally:
        node.kubectl("taint", "node", name, f"{TAINT}-")
    job.reaches(step + 2, SECONDS)
    assert not set(before.values()) & set(job.lives().values())
    assert job.status()["trainer"].get("charged", 0) == 0, "an eviction is not charged"
    complete(job)


def test_an_image_of_the_second_attempt_that_is_missing_is_said_and_the_job_continues_once_it_is_corrected(
    node: Cluster, namespace: str
) -> None:
    job = Job(node, namespace, small())
    job.apply()
    step = job.reaches(6, SECONDS)
    trainer = job.body["spec"]["trainer"]
    job.change(trainer=with_main(trainer, image="localhost/there-is-none:2", imagePullPolicy="IfNotPresent"))
    message = job.has_reason("Ready", "ImagePullFailed", 30)
    assert "localhost/there-is-none:2" in message
    job.change(trainer={"template": None})
    job.reaches(step + 2, SECONDS)
    complete(job)


def test_a_pod_of_a_two_node_trainer_that_dies_restarts_the_whole_group(node: Cluster, namespace: str) -> None:
    trainer = quickstart()["spec"]["trainer"] | {"nodes": 2}
    job = Job(node, namespace, small(trainer=trainer))
    job.apply()
    step = job.reaches(7, SECONDS)
    before, engines = job.pods("trainer"), job.lives("trainer")
    kill_containers(before[1])
    job.until(lambda: job.status()["trainer"]["number"] == 2, 60, "the second attempt")
    after = job.has_pods("trainer", 2, SECONDS)
    assert not {pod["metadata"]["uid"] for pod in before} & {pod["metadata"]["uid"] for pod in after}
    job.reaches(step + 2, SECONDS)
    assert job.lives("trainer") == engines, "others were touched"
    complete(job)
