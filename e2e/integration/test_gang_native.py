"""Gangs of kube-scheduler (PodGroups of scheduling.k8s.io): all pods of a gang get nodes, or none.

kwok simulates nodes of 8 GPUs each. The control plane has the feature gates of Kubernetes 1.36.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from e2e.integration.gang_jobs import (
    NATIVE_GATES,
    gang_bound,
    gone,
    gpu_nodes,
    operator,
    whole,
    with_gang,
)
from e2e.integration.job_lifecycle import JobClient
from tools.cluster.controlplane import ControlPlane
from tools.cluster.fixtures import ROOT

pytestmark = pytest.mark.timeout(600)

STARTS = 100 if os.environ.get("RLJOB_THOROUGH") else 3
PROVIDERS = ("none", "kubernetes")


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """A control plane without nodes, whose scheduler knows gangs."""
    with ControlPlane(manifests=sorted(ROOT.glob("crds/*.yaml")), flags=NATIVE_GATES) as made:
        yield made


@pytest.fixture
def where(plane: ControlPlane) -> Iterator[str]:
    """A namespace of the test's own."""
    name = plane.namespace()
    yield name
    plane.api.delete(f"/api/v1/namespaces/{name}")


async def test_two_jobs_of_two_nodes_on_three_nodes_one_is_whole_and_the_other_has_no_pod_bound(
    plane: ControlPlane, where: str
):
    one, other = JobClient(plane, where, "one"), JobClient(plane, where, "other")
    with gpu_nodes(plane, 3):
        async with operator(plane, where) as running:
            await asyncio.gather(one.apply(**with_gang("kubernetes")), other.apply(**with_gang("kubernetes")))

            async def first() -> JobClient | None:
                counts = [await gang_bound(one), await gang_bound(other)]
                return (one, other)[counts.index(9)] if 9 in counts else None

            winner = await one.until(first)
            loser = other if winner is one else one
            message = await loser.reason("GangPending")
            assert "none of the 9 pods of the gang has a node" in message and "insufficient nvidia.com/gpu" in message
            for _ in range(10):
                assert (await gang_bound(winner), await gang_bound(loser)) == (9, 0)
                await asyncio.sleep(0.5)
            await running.settled(loser.name)
            await gone(winner)
            await whole(loser)


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_a_job_that_fits_exactly_always_starts(plane: ControlPlane, where: str, provider: str):
    with gpu_nodes(plane, 2):
        async with operator(plane, where):
            for number in range(STARTS):
                job = JobClient(plane, where, f"sums-{number}")
                await job.apply(**with_gang(provider))
                await whole(job)
                await gone(job)
