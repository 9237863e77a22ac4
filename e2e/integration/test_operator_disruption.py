"""Evictions, as of a drain, and pods that are refused, in a real control plane whose pods kwok plays."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from e2e.integration.job_lifecycle import Life
from e2e.integration.operators import running_operator
from rljob.operator.planning import scale
from tools.cluster.client import ApiError
from tools.cluster.controlplane import ControlPlane

pytestmark = pytest.mark.timeout(300)

TOO_MANY_REQUESTS = 429


@pytest.fixture
def life(cluster: ControlPlane, namespace: str) -> Life:
    return Life(cluster, namespace)


def operator(life: Life) -> Any:
    return running_operator(life.cluster.kubeconfig, [life.namespace])


async def evict(life: Life, pod: str) -> bool:
    """Ask for an eviction; return whether it was granted."""
    path = f"{life.cluster.api.path('v1', 'Pod', life.namespace, pod)}/eviction"
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": life.namespace}}
    try:
        await asyncio.to_thread(life.cluster.api.post, path, body)
    except ApiError as error:
        assert error.code == TOO_MANY_REQUESTS, error
        return False
    return True


async def test_a_drain_ends_where_no_node_has_room_for_what_it_evicts(life: Life, monkeypatch):
    """One engine after the other goes, though what takes their place finds no node."""
    monkeypatch.setattr(scale, "SCHEDULING_SECONDS", 1.0)
    mark = {"rljob.test/engines": life.namespace}
    nodes = await asyncio.to_thread(life.cluster.api.list, "/api/v1/nodes")
    path = f"/api/v1/nodes/{nodes[0]['metadata']['name']}"
    await asyncio.to_thread(life.cluster.api.patch, path, {"metadata": {"labels": mark}})
    pool = {"name": "main", "replicas": {"min": 3}, "template": {"spec": {"nodeSelector": mark}}}
    async with operator(life):
        await life.apply(rollouts=[pool])
        await life.ready_pods()
        engines = [pod["metadata"]["name"] for pod in await life.pods("rollout-main")]
        await asyncio.to_thread(life.cluster.api.patch, path, {"metadata": {"labels": dict.fromkeys(mark)}})
        for engine in engines:
            await life.until(lambda engine=engine: evict(life, engine))

        async def none_has_a_node() -> bool:
            message = (await life.condition("Ready"))[2]
            budget = (await life.children("PodDisruptionBudget"))["sums-rollout-main"]
            return message.startswith("3 of 3 rollout-main pods pending: ") and budget["spec"]["maxUnavailable"] == 4

        await life.until(none_has_a_node)


async def test_a_trainer_that_is_not_to_be_disrupted_is_not_until_the_job_says_so(life: Life):
    async with operator(life):
        await life.run_up(trainer={"nodes": 2}, failurePolicy={"disruption": "Block"})
        pod = await life.any_pod("trainer")

        async def counted() -> bool:
            budget = (await life.children("PodDisruptionBudget"))["sums-trainer"]
            return bool(budget.get("status", {}).get("currentHealthy") == 2)

        await life.until(counted)
        assert not await evict(life, pod)
        await life.change(failurePolicy={"disruption": "Allow"})
        await life.until(lambda: evict(life, pod))
        assert (await life.attempt(2))["charged"] == 0


async def test_pods_that_a_namespace_refuses_are_said_to_be_in_its_words(life: Life):
    """A Job says so in its events alone."""
    labels = {"pod-security.kubernetes.io/enforce": "baseline"}
    await life.kubectl("label", "namespace", life.namespace, *(f"{key}={value}" for key, value in labels.items()))
    async with operator(life):
        await life.apply(trainer={"hostNetwork": True}, network={"policy": "Disabled"})
        message = await life.reason("PodsForbidden")
        assert message.startswith('1 of 1 trainer pod refused: violates PodSecurity "baseline:latest": host namespaces')
