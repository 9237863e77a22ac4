"""Evictions, as in a drain, and forbidden pods, in a real control plane with pods simulated by kwok."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from e2e.integration.job_lifecycle import JobClient
from e2e.integration.operators import running_operator
from rljob.operator.planning import scale
from tools.cluster.client import ApiError
from tools.cluster.controlplane import ControlPlane

pytestmark = pytest.mark.timeout(300)

TOO_MANY_REQUESTS = 429


@pytest.fixture
def job_client(cluster: ControlPlane, namespace: str) -> JobClient:
    return JobClient(cluster, namespace)


def operator(job_client: JobClient) -> Any:
    return running_operator(job_client.cluster.kubeconfig, [job_client.namespace])


async def evict(job_client: JobClient, pod: str) -> bool:
    """Request an eviction; return whether the API server allowed it."""
    path = f"{job_client.cluster.api.path('v1', 'Pod', job_client.namespace, pod)}/eviction"
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": job_client.namespace}}
    try:
        await asyncio.to_thread(job_client.cluster.api.post, path, body)
    except ApiError as error:
        assert error.code == TOO_MANY_REQUESTS, error
        return False
    return True


async def test_a_drain_completes_when_no_node_has_room_for_the_evicted_pods(job_client: JobClient, monkeypatch):
    """Engines can be evicted one after the other although their replacements stay pending."""
    monkeypatch.setattr(scale, "SCHEDULING_SECONDS", 1.0)
    mark = {"rljob.test/engines": job_client.namespace}
    nodes = await asyncio.to_thread(job_client.cluster.api.list, "/api/v1/nodes")
    path = f"/api/v1/nodes/{nodes[0]['metadata']['name']}"
    await asyncio.to_thread(job_client.cluster.api.patch, path, {"metadata": {"labels": mark}})
    pool = {"name": "main", "replicas": {"min": 3}, "template": {"spec": {"nodeSelector": mark}}}
    async with operator(job_client):
        await job_client.apply(rollouts=[pool])
        await job_client.ready_pods()
        engines = [pod["metadata"]["name"] for pod in await job_client.pods("rollout-main")]
        await asyncio.to_thread(job_client.cluster.api.patch, path, {"metadata": {"labels": dict.fromkeys(mark)}})
        for engine in engines:
            await job_client.until(lambda engine=engine: evict(job_client, engine))

        async def none_has_a_node() -> bool:
            message = (await job_client.condition("Ready"))[2]
            budget = (await job_client.children("PodDisruptionBudget"))["sums-rollout-main"]
            return message.startswith("3 of 3 rollout-main pods pending: ") and budget["spec"]["maxUnavailable"] == 4

        await job_client.until(none_has_a_node)


async def test_disruption_block_prevents_evictions_of_the_trainer_until_it_is_changed(job_client: JobClient):
    async with operator(job_client):
        await job_client.run_up(trainer={"nodes": 2}, failurePolicy={"disruption": "Block"})
        pod = await job_client.any_pod("trainer")

        async def counted() -> bool:
            budget = (await job_client.children("PodDisruptionBudget"))["sums-trainer"]
            return bool(budget.get("status", {}).get("currentHealthy") == 2)

        await job_client.until(counted)
        assert not await evict(job_client, pod)
        await job_client.change(failurePolicy={"disruption": "Allow"})
        await job_client.until(lambda: evict(job_client, pod))
        assert (await job_client.attempt(2))["charged"] == 0


async def test_pods_that_a_namespace_forbids_are_reported_with_the_cause(job_client: JobClient):
    """A Job reports this only in its events."""
    labels = {"pod-security.kubernetes.io/enforce": "baseline"}
    await job_client.kubectl(
        "label", "namespace", job_client.namespace, *(f"{key}={value}" for key, value in labels.items())
    )
    async with operator(job_client):
        await job_client.apply(trainer={"hostNetwork": True}, network={"policy": "Disabled"})
        message = await job_client.reason("PodsForbidden")
        assert message.startswith('1 of 1 trainer pod refused: violates PodSecurity "baseline:latest": host namespaces')
