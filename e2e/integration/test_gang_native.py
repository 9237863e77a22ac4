"""Gangs of kube-scheduler (PodGroups of scheduling.k8s.io): all pods of a gang get nodes, or none.

kwok simulates nodes of 8 GPUs each. The control plane has the feature gates of Kubernetes 1.36.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from datetime import datetime

import pytest

from e2e.integration.gang_jobs import (
    NATIVE_GATES,
    POOL,
    bound,
    gang_bound,
    gone,
    gpu_nodes,
    members,
    operator,
    whole,
    with_gang,
)
from e2e.integration.job_lifecycle import JobClient
from e2e.integration.operators import Object
from tools.cluster.controlplane import ControlPlane
from tools.cluster.fixtures import ROOT

pytestmark = pytest.mark.timeout(3600 if os.environ.get("RLJOB_THOROUGH") else 600)

STARTS = 100 if os.environ.get("RLJOB_THOROUGH") else 3
DEATHS = 50 if os.environ.get("RLJOB_THOROUGH") else 2
PROVIDERS = ("none", "kubernetes")
NOBODY = {"provider": "none"}


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """A control plane without nodes, whose scheduler knows gangs."""
    with ControlPlane(manifests=sorted(ROOT.glob("crds/*.yaml")), flags=NATIVE_GATES) as made:
        yield made


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
            await loser.reason("GangPending")
            await loser.says("none of the 9 pods of the gang has a node: insufficient nvidia.com/gpu")
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


async def test_a_trainer_of_several_nodes_that_fits_exactly_always_starts(plane: ControlPlane, where: str):
    """Engines that were tried before the trainer's pods are created again, and are then tried after them."""
    with gpu_nodes(plane, 3):
        async with operator(plane, where):
            for number in range(STARTS):
                job = JobClient(plane, where, f"sums-{number}")
                await job.apply(**with_gang("kubernetes", trainer={"nodes": 2, "processesPerNode": 8}))
                await whole(job, 10)
                await gone(job)


async def test_a_smaller_gang_gets_a_new_pod_group_and_its_attempt_is_free(plane: ControlPlane, where: str):
    job = JobClient(plane, where)
    groups = f"/apis/scheduling.k8s.io/v1alpha2/namespaces/{where}/podgroups"

    async def size(count: int) -> bool:
        found = await asyncio.to_thread(plane.api.list, groups)
        return [each["spec"]["schedulingPolicy"]["gang"]["minCount"] for each in found] == [count]

    with gpu_nodes(plane, 3):
        async with operator(plane, where) as running:
            await job.apply(**with_gang("kubernetes"))
            await whole(job)
            assert await size(9)
            await job.change(rollouts=[{"name": "main", "replicas": {"min": 9}}])
            await whole(job, 10)
            assert await size(9), "the spec of a PodGroup cannot be changed; more members do not need it"
            await job.change(rollouts=[{"name": "main", "replicas": {"min": 2}}])
            await job.until(lambda: size(3))
            await whole(job, 3)
            trainer = (await job.status())["trainer"]
            assert (trainer["number"], trainer["charged"]) == (2, 0)
            await running.settled()
            await job.change(suspend=True)
            await job.apply_run("Suspended")
            await job.reason("Suspended", "Suspended")
            assert not await asyncio.to_thread(plane.api.list, groups)
            await job.change(suspend=False)
            await whole(job, 3)


async def test_without_the_feature_gates_no_pod_of_the_gang_is_created(cluster: ControlPlane, namespace: str):
    """An API server without the gates drops the field of the pods, and the scheduler would place them one by one."""
    job = JobClient(cluster, namespace)
    async with operator(cluster, namespace) as running:
        await job.apply(**with_gang("kubernetes"))
        message = await job.reason("APIRejected")
        assert "enable the feature gates GenericWorkload and GangScheduling" in message
        await running.settled()
        assert members(await job.pods()) == []


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_a_trainer_that_dies_gets_its_node_back_from_elastic_engines(
    plane: ControlPlane, where: str, provider: str
):
    """Two nodes: the trainer has one, four engines and as many elastic ones the other; four elastic ones find no node
    until the trainer dies."""
    job = JobClient(plane, where)
    spec = with_gang(provider, rollouts=[{"name": "main", "replicas": {"min": 4, "max": 12}, "autoscaling": NOBODY}])
    with gpu_nodes(plane, 2):
        async with operator(plane, where):
            await job.apply(**spec, failurePolicy={"maxRestarts": 1000})
            await whole(job, 5)
            await job.kubectl("scale", "rljs", "sums-rollout-main", "--replicas=12")
            waited = [await kill_trainer(job, number) for number in range(1, DEATHS + 1)]
            assert max(waited) <= 10, waited


async def kill_trainer(job: JobClient, attempt: int) -> float:
    """Kill an attempt of the trainer while engines have no node; return the seconds from the end of its back-off until
    the next attempt has a node."""

    async def contended() -> bool:
        engines = await job.pods(POOL)
        return (len(engines), len(bound(engines)), await gang_bound(job)) == (12, 8, 5)

    await job.until(contended)
    path = job.cluster.api.path("rljob.dev/v1alpha1", "RLJob", job.namespace, job.name)
    forgive = {"status": {"trainer": {"charged": 0}}}  # the back-off of many deaths takes a minute
    await asyncio.to_thread(job.cluster.api.patch, f"{path}/status", forgive)
    job.cluster.pods.exit(job.namespace, await job.any_pod("trainer"), 137)

    async def placed() -> Object | None:
        pods = [pod for pod in await job.pods("trainer") if f"-trainer-{attempt + 1}-" in pod["metadata"]["name"]]
        return pods[0] if pods and bound(pods) else None

    pod = await job.until(placed, 90)
    trainer = (await job.status())["trainer"]
    begins = trainer.get("notBefore") or trainer["startedAt"]
    scheduled = next(each for each in pod["status"]["conditions"] if each["type"] == "PodScheduled")
    return seconds_of(scheduled["lastTransitionTime"]) - seconds_of(begins)


def seconds_of(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()
