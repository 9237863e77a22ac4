"""A trainer of two pods: FSDP2 with two engines, and Megatron-Core."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from e2e.pods.job import RESTRICTED, SMALL_MODEL, Job, quickstart
from tools.cluster.node import Cluster

STEPS = 30
SECONDS = 240.0
TENSOR_PARALLEL = {"backend": "megatron", "nodes": 2, "parallelism": {"tensor": 2}}
GAIN = 0.3


@pytest.fixture
def namespace(node: Cluster, installed: Any) -> Iterator[str]:
    name = node.namespace("two-nodes", RESTRICTED)
    yield name
    node.api.delete(f"/api/v1/namespaces/{name}")


@pytest.mark.timeout(600)
def test_a_trainer_of_two_pods_and_two_engines_train_over_the_pod_network(node: Cluster, namespace: str) -> None:
    spec = quickstart()["spec"]
    body = quickstart(
        initializer=SMALL_MODEL,
        training=spec["training"] | {"steps": STEPS, "promptsPerStep": 8},
        evaluation={"problems": 32},
        trainer=spec["trainer"] | {"nodes": 2},
        rollouts=[spec["rollouts"][0] | {"kvCacheBytes": 64 << 20, "replicas": {"min": 2}}],
        checkpoints={"everySteps": 10, "keep": 2},
    )
    job = Job(node, namespace, body)
    job.apply()
    job.has_pods("trainer", 2, SECONDS)
    job.has_pods("rollout-main", 2, SECONDS)
    job.reaches(2, SECONDS)
    assert job.status()["ready"] | {"restarts": ""} == {
        "trainer": "2/2", "rollout": "2/2", "reward": "1/1", "environment": "", "restarts": ""
    }  # fmt: skip
    addresses = {pod["status"]["podIP"] for pod in job.pods("trainer")}
    assert len(addresses) == 2, "two pods, each with a network of its own"
    job.until(lambda: job.condition("Complete")[0] == "True", SECONDS, "the job to be complete")
    assert job.status()["trainer"]["number"] == 1 and not job.status()["ready"].get("restarts")
    engines = {row["engine"] for row in job.ledger("SELECT DISTINCT engine FROM completions")}
    assert len(engines) == 2, "an engine did nothing"
    first, last = (job.ledger(f"SELECT metrics FROM applied WHERE step = {step}")[0] for step in (0, STEPS - 1))
    assert first and last
    report = job.audit()
    assert report["ok"] and report["finished"], report


@pytest.mark.timeout(900)
def test_half_of_each_layer_in_each_of_two_pods_learns_with_vllm(node: Cluster, namespace: str) -> None:
    spec = quickstart()["spec"]
    body = quickstart(
        evaluation={"problems": 256},
        trainer=spec["trainer"] | TENSOR_PARALLEL,
        checkpoints={"everySteps": 25, "keep": 2},
    )
    job = Job(node, namespace, body)
    job.apply()
    job.has_pods("trainer", 2, SECONDS)
    job.until(lambda: job.condition("Complete")[0] == "True", 2 * SECONDS, "the job to be complete")
    assert not job.status()["ready"].get("restarts")
    evaluations = job.run_status()["evaluations"]
    assert evaluations[-1]["accuracy"] - evaluations[0]["accuracy"] >= GAIN, evaluations
    report = job.audit()
    assert report["ok"] and report["finished"], report
