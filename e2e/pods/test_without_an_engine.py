"""A job in a cluster without a running engine: conditions, resources, completion and deletion."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.pods.job import IDLE_RESOURCES, RESTRICTED, WAIT_FOR_SIGTERM, Job, quickstart
from tools.cluster.client import Object
from tools.cluster.node import Cluster

SOON = 30.0
"""Maximum seconds until a condition reports a problem."""
START_SECONDS = 90.0

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def namespace(node: Cluster, installed: Any) -> Iterator[str]:
    """A namespace of the test's own that takes restricted pods only."""
    name = node.namespace("engineless", RESTRICTED)
    yield name
    node.api.delete(f"/api/v1/namespaces/{name}")


def job_in(node: Cluster, namespace: str, **spec: Any) -> Job:
    """Apply the quickstart without its initializer, with other fields."""
    body = quickstart(**spec)
    body["spec"] = {name: value for name, value in body["spec"].items() if name != "initializer"}
    job = Job(node, namespace, body)
    job.apply()
    return job


def idle() -> Object:
    """Return fields of the spec of a job whose trainer, engines and runner are there and do nothing."""
    fine = {"exec": {"command": ["true"]}}
    probes = {"livenessProbe": fine, "readinessProbe": fine}
    container = {"name": "main", "command": ["python", "-c", WAIT_FOR_SIGTERM], "resources": IDLE_RESOURCES, **probes}
    template = {"spec": {"containers": [container]}}
    spec = quickstart()["spec"]
    rollouts = [spec["rollouts"][0] | {"template": template}]
    return {
        "trainer": spec["trainer"] | {"template": template},
        "rollouts": rollouts,
        "runner": {"template": template},
    }


def test_an_image_that_does_not_exist_shows_in_the_conditions_within_30_seconds(node: Cluster, namespace: str) -> None:
    image = "localhost/there-is-none:1"
    template = {"spec": {"containers": [{"name": "main", "image": image, "imagePullPolicy": "IfNotPresent"}]}}
    spec = idle()
    job = job_in(node, namespace, **spec | {"trainer": spec["trainer"] | {"template": template}})
    message = job.has_reason("Ready", "ImagePullFailed", SOON)
    assert image in message and "trainer" in message and "correct" in message, message


def test_a_model_that_does_not_exist_shows_in_the_conditions_within_30_seconds(node: Cluster, namespace: str) -> None:
    job = job_in(node, namespace, models=[{"name": "policy", "source": "job://there-is-none"}])
    message = job.has_reason("Failed", "ConfigurationError", SOON)
    assert "there-is-none" in message, message


def test_a_volume_that_does_not_exist_shows_in_the_conditions_within_30_seconds(node: Cluster, namespace: str) -> None:
    job = job_in(node, namespace, storage={"claim": "there-is-none"})
    message = job.has_reason("Ready", "VolumeClaimPending", SOON)
    assert "claim there-is-none does not exist" in message and "spec.storage.claim" in message, message


@pytest.mark.alone
def test_a_node_drain_ends_and_the_job_continues_when_there_is_a_node_again(node: Cluster, namespace: str) -> None:
    job = job_in(node, namespace, **idle())
    job.all_up(START_SECONDS)
    before, (name,) = job.lives(), node.nodes
    try:
        began = time.monotonic()
        job.kubectl(
            "drain", name, "--delete-emptydir-data", "--ignore-daemonsets", f"--pod-selector=rljob.dev/job={job.name}",
            "--timeout=90s",
        )  # fmt: skip
        assert time.monotonic() - began < 60
        assert all(pod["status"]["phase"] == "Pending" for pod in job.pods()), "a pod stayed"
        assert "nodes are cordoned" in job.has_reason("Ready", "PodsPending", SOON)
    finally:
        node.kubectl("uncordon", name)
    job.all_up(START_SECONDS)
    assert not {uid for uid, _ in before.values()} & {uid for uid, _ in job.lives().values()}
    trainer = job.status()["trainer"]
    assert trainer["number"] == 2 and trainer.get("charged", 0) == 0, "a drain is not charged"


def test_deleting_the_rljob_removes_all_but_its_claim(node: Cluster, namespace: str) -> None:
    job = job_in(node, namespace, **idle())
    job.all_up(START_SECONDS)
    assert {each.partition("/")[0] for each in job.children()} >= {"Job", "Deployment", "StatefulSet", "Service", "Pod"}
    secrets = [each["metadata"]["name"] for each in node.api.list(f"/api/v1/namespaces/{namespace}/secrets")]
    assert any(secret.startswith("quickstart-tokens-") for secret in secrets)
    job.delete()
    job.until_gone(60, "PersistentVolumeClaim/quickstart-storage")
    assert node.api.list(f"/api/v1/namespaces/{namespace}/secrets") == []
