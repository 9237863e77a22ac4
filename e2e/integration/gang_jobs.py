"""Jobs whose gang needs whole nodes, on a control plane with simulated nodes of 8 GPUs each."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from e2e.integration.job_lifecycle import GPUS, JobClient
from e2e.integration.operators import SECONDS, Object, RunningOperator, running_operator
from rljob.manifests.inputs import Cluster
from tools.cluster.controlplane import ControlPlane

POOL, TIER = "rollout-main", "rljob.dev/tier"
WIDE: dict[str, Any] = {
    "trainer": {"processesPerNode": 8},
    "rollouts": [{"name": "main", "replicas": {"min": 8}}],
    "training": {"steps": 5, "promptsPerStep": 8},
}
"""A job of 8 + 8 GPUs: a trainer that needs a whole node, and eight engines."""
NATIVE_GATES: Mapping[str, Sequence[str]] = {
    "apiserver": ["--feature-gates=GenericWorkload=true", "--runtime-config=scheduling.k8s.io/v1alpha2=true"],
    "controller-manager": ["--feature-gates=GenericWorkload=true"],
    "scheduler": ["--feature-gates=GenericWorkload=true,GangScheduling=true"],
}
"""Flags of Kubernetes 1.36 for PodGroups of scheduling.k8s.io."""


def with_gang(provider: str, queue: str = "", **spec: Any) -> dict[str, Any]:
    """Return the fields of a wide job with a gang provider."""
    gang = {"provider": provider} | ({"queue": queue} if queue else {})
    return {**WIDE, "scheduling": {"gang": gang}, **spec}


@contextlib.asynccontextmanager
async def operator(plane: ControlPlane, *namespaces: str, cluster: Cluster = GPUS) -> AsyncIterator[RunningOperator]:
    """Run an operator of a cluster with GPUs."""
    async with running_operator(plane.kubeconfig, namespaces, cluster=cluster) as running:
        yield running


@contextlib.contextmanager
def gpu_nodes(plane: ControlPlane, count: int, taints: Sequence[Mapping[str, str]] = (), **labels: str) -> Any:
    """Have nodes of 8 GPUs; yields their names."""
    names = plane.nodes(count, gpus=8, labels=labels, taints=taints)
    try:
        yield names
    finally:
        for name in names:
            plane.api.delete(f"/api/v1/nodes/{name}")


def members(pods: Sequence[Object]) -> list[Object]:
    """Return the pods of the gang."""
    return [pod for pod in pods if pod["metadata"]["labels"].get(TIER) == "gang"]


def bound(pods: Sequence[Object]) -> list[Object]:
    """Return the pods that have a node."""
    return [pod for pod in pods if pod["spec"].get("nodeName")]


async def gang_bound(job: JobClient) -> int:
    """Return how many pods of a job's gang have a node."""
    return len(bound(members(await job.pods())))


async def whole(job: JobClient, size: int = 9, seconds: float = 60.0) -> None:
    """Wait until all pods of a job's gang have nodes."""

    async def placed() -> bool:
        return await gang_bound(job) == size

    await job.until(placed, seconds)


async def gone(job: JobClient) -> None:
    """Delete a job and wait until it has no pods."""
    await job.delete()

    async def empty() -> bool:
        path = f"/api/v1/namespaces/{job.namespace}/pods"
        found = await asyncio.to_thread(job.cluster.api.list, path, labelSelector=f"rljob.dev/job={job.name}")
        return not found

    deadline = time.monotonic() + SECONDS
    while not await empty():
        assert time.monotonic() < deadline, f"pods of {job.name} stay"
        await asyncio.sleep(0.1)
