"""Engines that span hosts on a real API server, with KubeRay's CustomResourceDefinition and a double of its controller.

kwok simulates the pods. KubeRay itself was never run.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from core.tests.goldens import CONTEXTS, across_hosts
from e2e.integration.faulty import crashing_client
from e2e.integration.job_lifecycle import GPUS, JobClient
from e2e.integration.kuberay_double import KubeRay, kuberay
from e2e.integration.operators import Object, running_operator
from rljob.manifests import render
from tools.cluster.client import ApiError
from tools.cluster.controlplane import ControlPlane

CRDS = os.environ.get("RLJOB_THIRD_PARTY_CRDS", "")
NO_CRDS = "RLJOB_THIRD_PARTY_CRDS names no directory with the CustomResourceDefinitions of other projects"
CRD = Path(CRDS) / "ray.io_rayclusters.yaml"
DEFINITION = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/rayclusters.ray.io"
pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(not CRDS, reason=NO_CRDS)]

POOL = "rollout-main"
ENGINE = {"name": "main", "hosts": 2, "parallelism": {"tensor": 2}}


def pool(**replicas: int) -> list[dict[str, Any]]:
    return [{**ENGINE, "replicas": replicas or {"min": 1}, "autoscaling": {"provider": "none"}}]


@pytest.fixture
def job_client(cluster: ControlPlane, namespace: str) -> JobClient:
    return JobClient(cluster, namespace)


def install(cluster: ControlPlane) -> None:
    cluster.kubectl("apply", "--server-side", "-f", str(CRD))
    cluster.api.wait_condition(DEFINITION, "Established")
    cluster.api.wait_for(lambda: cluster.api.exists("/apis/ray.io/v1"), what="the type RayCluster")


def uninstall(cluster: ControlPlane) -> None:
    cluster.kubectl("delete", "-f", str(CRD), "--ignore-not-found")
    cluster.api.wait_for(lambda: not cluster.api.exists("/apis/ray.io/v1"), what="no type RayCluster")


@pytest.fixture
def installed(cluster: ControlPlane) -> Iterator[None]:
    """KubeRay's type."""
    install(cluster)
    yield
    uninstall(cluster)


@pytest.fixture
async def double(installed: None, cluster: ControlPlane, namespace: str) -> AsyncIterator[KubeRay]:
    """KubeRay's type, and the double of its controller."""
    async with kuberay(cluster.api, namespace) as controller:
        yield controller


def operator(job_client: JobClient, **how: Any) -> Any:
    return running_operator(job_client.cluster.kubeconfig, [job_client.namespace], cluster=GPUS, **how)


async def ready(job_client: JobClient, engines: int) -> dict[str, Object]:
    """Wait until so many engines are ready and no others exist; return their RayClusters."""

    async def reached() -> dict[str, Object] | None:
        found = await job_client.children("RayCluster")
        role = await job_client.role(POOL)
        pods = [pod["metadata"]["labels"]["ray.io/cluster"] for pod in await job_client.pods(POOL)]
        done = len(found) == role.get("ready") == role.get("desired") == engines
        done = done and sorted(pods) == sorted([*found, *found])
        return found if done else None

    found: dict[str, Object] = await job_client.until(reached)
    return found


async def pods_of(job_client: JobClient, cluster: str) -> dict[str, str]:
    """Return head and worker → name of the pod of a RayCluster."""
    pods = [pod for pod in await job_client.pods(POOL) if pod["metadata"]["labels"]["ray.io/cluster"] == cluster]
    return {pod["metadata"]["labels"]["ray.io/node-type"]: pod["metadata"]["name"] for pod in pods}


# --- the type ---------------------------------------------------------------------------------------------------------


def test_rendered_ray_clusters_are_accepted_strictly_and_without_a_warning(
    installed: None, cluster: ControlPlane, namespace: str
) -> None:
    cluster.api.warnings.clear()
    roles = [role for role in render(across_hosts(), CONTEXTS["gpu"]) if role.kind in ("network", "rollout")]
    objects = [each for role in roles for each in role.objects]
    clusters = [each for each in objects if each["kind"] == "RayCluster"]
    assert len(clusters) == 4
    for each in objects:
        each = {**each, "metadata": {**each["metadata"], "namespace": namespace}}
        path = cluster.api.path(each["apiVersion"], each["kind"], namespace)
        stored = cluster.api.post(path, each, dryRun="All", fieldValidation="Strict")
        for part in ("headGroupSpec", "workerGroupSpecs") if each["kind"] == "RayCluster" else ():
            assert _without_defaults(stored["spec"][part]) == _without_defaults(each["spec"][part])
    assert not cluster.api.warnings
    misspelt = {**clusters[0], "metadata": {"name": "x", "namespace": namespace}}
    misspelt["spec"] = {**misspelt["spec"], "headGroupSpecs": {}}
    with pytest.raises(ApiError, match="unknown field"):
        path = cluster.api.path("ray.io/v1", "RayCluster", namespace)
        cluster.api.post(path, misspelt, dryRun="All", fieldValidation="Strict")


def _without_defaults(value: Any) -> Any:
    """Return what a RayCluster says, without the defaults of its type."""
    if isinstance(value, list):
        return [_without_defaults(each) for each in value]
    if isinstance(value, dict):
        return {key: _without_defaults(each) for key, each in value.items() if key not in ("numOfHosts", "priority")}
    return value


async def test_a_job_without_kuberay_says_so_and_starts_when_it_is_installed(job_client: JobClient) -> None:
    cluster = job_client.cluster
    assert not cluster.api.exists(DEFINITION)
    async with operator(job_client):
        await job_client.apply(rollouts=pool())
        message = await job_client.reason("APIRejected")
        reason = "the cluster has no type RayCluster; install KubeRay"
        assert message == f"RayCluster sums-rollout-main-0 cannot be made: {reason}"
        await asyncio.to_thread(install, cluster)
        try:
            async with kuberay(cluster.api, job_client.namespace):
                await ready(job_client, 1)
                await job_client.reason("Starting")
        finally:
            await asyncio.to_thread(uninstall, cluster)


# --- the life of engines ----------------------------------------------------------------------------------------------


async def test_an_engine_has_a_head_and_a_worker_and_is_ready_with_both(double: KubeRay, job_client: JobClient) -> None:
    restricted = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    await asyncio.to_thread(job_client.cluster.api.patch, f"/api/v1/namespaces/{job_client.namespace}", restricted)
    async with operator(job_client) as running:
        await job_client.run_up(rollouts=pool())
        (found,) = await ready(job_client, 1)
        assert found == "sums-rollout-main-0"
        commands = {}
        for pod in await job_client.pods(POOL):
            main = pod["spec"]["containers"][0]
            commands[pod["metadata"]["labels"]["ray.io/node-type"]] = main["command"][3:]
            assert main["resources"]["limits"]["nvidia.com/gpu"] == "1"
            given = {each["name"]: each.get("value", "") for each in main["env"]}
            assert given["KUBERAY_GEN_RAY_START_CMD"].startswith("ray start")
        assert commands == {"head": [], "worker": ["--worker"]}
        service = await asyncio.to_thread(
            job_client.cluster.api.get, f"/api/v1/namespaces/{job_client.namespace}/services/{found}-head-svc"
        )
        labels = [pod["metadata"]["labels"] for pod in await job_client.pods(POOL)]
        selected = [each["ray.io/node-type"] for each in labels if service["spec"]["selector"].items() <= each.items()]
        assert selected == ["head"], "workers find the head"
        await running.settled()
        assert double.refused == []


async def test_the_operator_writes_nothing_about_engines_at_rest(double: KubeRay, job_client: JobClient) -> None:
    async with operator(job_client) as running:
        await job_client.run_up(rollouts=pool(min=1, max=2))
        await running.settled()
        before = (await job_client.children("RayCluster"))["sums-rollout-main-0"]["metadata"]
        for _ in range(3):
            assert await running.reconciled()
    async with operator(job_client) as running:  # another one reads the same state
        await running.settled()
        after = (await job_client.children("RayCluster"))["sums-rollout-main-0"]["metadata"]
        assert (after["uid"], after["generation"]) == (before["uid"], before["generation"])


@pytest.mark.parametrize("which", ["head", "worker"])
async def test_an_engine_is_replaced_as_a_whole_when_a_pod_is_deleted(
    double: KubeRay, job_client: JobClient, which: str
) -> None:
    async with operator(job_client):
        await job_client.run_up(rollouts=pool())
        (before,) = await ready(job_client, 1)
        pods = await pods_of(job_client, before)
        await asyncio.sleep(11)  # an engine that loses a pod at once is backed off
        await job_client.kubectl("delete", "pod", pods[which], "--wait=false")

        async def replaced() -> bool:
            return before not in await job_client.children("RayCluster")

        await job_client.until(replaced)
        (after,) = await ready(job_client, 1)
        assert not set((await pods_of(job_client, after)).values()) & set(pods.values())
        assert await job_client.events() and "EngineReplaced" in await job_client.events()
        assert (await job_client.role(POOL))["restarts"] == 0


async def test_an_engine_is_replaced_after_an_exit_and_carries_the_count(
    double: KubeRay, job_client: JobClient
) -> None:
    async with operator(job_client):
        await job_client.run_up(rollouts=pool())
        (before,) = await ready(job_client, 1)
        worker = (await pods_of(job_client, before))["worker"]
        await asyncio.to_thread(job_client.cluster.pods.restart, job_client.namespace, worker, 1, "CUDA error")

        async def replaced() -> bool:
            return before not in await job_client.children("RayCluster")

        await job_client.until(replaced)
        ((after, body),) = (await ready(job_client, 1)).items()
        assert after != before
        assert body["metadata"]["annotations"]["rljob.dev/restarts"] == "1"
        role = await job_client.role(POOL)
        assert (role["restarts"], role["lastExit"]) == (1, "exit code 1")


async def test_an_operator_that_is_killed_during_a_replacement_leaves_no_engine_too_many(
    double: KubeRay, job_client: JobClient
) -> None:
    async with operator(job_client):
        await job_client.run_up(rollouts=pool())
        (before,) = await ready(job_client, 1)
    for at in (1, 2):  # the deletion, the creation
        worker = (await pods_of(job_client, before))["worker"]
        await asyncio.to_thread(job_client.cluster.pods.restart, job_client.namespace, worker, 1)
        async with operator(job_client, client=crashing_client(at, after=True)) as running:
            await running.client.crashed.wait()
            await running.kill()
        async with operator(job_client) as running:

            async def replaced(name: str = before) -> bool:
                return name not in await job_client.children("RayCluster")

            await job_client.until(replaced)
            (before,) = await ready(job_client, 1)
            await running.settled()


async def test_engines_follow_the_scale_and_are_drained(double: KubeRay, job_client: JobClient) -> None:
    async with operator(job_client):
        await job_client.run_up(rollouts=pool(min=1, max=3))
        await job_client.kubectl("scale", "rljs", "sums-rollout-main", "--replicas=3")
        found = await ready(job_client, 3)
        tiers = {name: each["metadata"]["labels"]["rljob.dev/tier"] for name, each in found.items()}
        assert tiers == {
            "sums-rollout-main-0": "gang",
            "sums-rollout-main-elastic-0": "elastic",
            "sums-rollout-main-elastic-1": "elastic",
        }
        heads = {name: (await pods_of(job_client, name))["head"] for name in found}
        engines = [{"name": head, "load": 5} for head in heads.values()]
        await job_client.apply_run("Running", engines=engines)
        await job_client.kubectl("scale", "rljs", "sums-rollout-main", "--replicas=1")

        async def draining() -> list[str]:
            return list((await job_client.status()).get("draining", []))

        elastic = {heads["sums-rollout-main-elastic-0"], heads["sums-rollout-main-elastic-1"]}
        assert set(await job_client.until(draining)) == elastic
        assert len(await job_client.children("RayCluster")) == 3, "engines with requests stay until they are drained"
        drained = [engine | {"load": 0, "drained": engine["name"] in elastic} for engine in engines]
        await job_client.apply_run("Running", engines=drained)
        assert list(await ready(job_client, 1)) == ["sums-rollout-main-0"]
        scale = (await job_client.children("RLJobScale"))["sums-rollout-main"]
        assert scale["spec"]["replicas"] == 1


async def test_an_eviction_replaces_an_engine_and_the_next_one_waits_for_it(
    double: KubeRay, job_client: JobClient
) -> None:
    async with operator(job_client):
        await job_client.run_up(rollouts=pool(min=2))
        found = sorted(await ready(job_client, 2))
        await asyncio.sleep(11)
        first, second = [await pods_of(job_client, name) for name in found]
        pods, namespace = job_client.cluster.pods, job_client.namespace

        async def budget() -> bool:
            status = (await job_client.children("PodDisruptionBudget"))["sums-rollout-main"].get("status", {})
            return bool(status.get("disruptionsAllowed"))

        await job_client.until(budget)
        await asyncio.to_thread(pods.evict, namespace, first["worker"])
        with pytest.raises(ApiError, match="disruption budget"):
            await asyncio.to_thread(pods.evict, namespace, second["worker"])
        assert found[1] in await ready(job_client, 2)
        await job_client.until(budget)


async def test_a_suspended_job_has_no_engines_and_a_deleted_one_leaves_none(
    double: KubeRay, job_client: JobClient
) -> None:
    async with operator(job_client):
        await job_client.run_up(rollouts=pool(), suspendGraceSeconds=0)
        await job_client.change(suspend=True)
        await job_client.reason("Suspended")
        assert await job_client.children("RayCluster") == {}
        await job_client.change(suspend=False)
        await ready(job_client, 1)
        await job_client.delete()

        async def gone() -> bool:
            return not await job_client.children("RayCluster") and not await job_client.pods()

        await job_client.until(gone)


async def test_a_controller_that_does_nothing_is_reported(double: KubeRay, job_client: JobClient) -> None:
    double.idle = True
    ahead = 0.0

    def wall() -> float:
        return time.time() + ahead

    namespaces = [job_client.namespace]
    async with running_operator(job_client.cluster.kubeconfig, namespaces, cluster=GPUS, wall=wall) as running:
        await job_client.apply(rollouts=pool())

        async def made() -> bool:
            return bool(await job_client.children("RayCluster"))

        await job_client.until(made)
        ahead = 90.0

        async def reported() -> bool:
            await running.reconciled()
            summary = (await job_client.role(POOL))["summary"]
            return "KubeRay has made no pods for RayCluster sums-rollout-main-0" in summary

        await job_client.until(reported)
