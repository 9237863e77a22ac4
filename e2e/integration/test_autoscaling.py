"""The replicas of a job follow its load on a real API server: by the operator, by an HPA, by kubectl, by KEDA's object.

kwok simulates the pods, and the test reports loads as the coordinator does.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from e2e.integration.job_lifecycle import JobClient
from e2e.integration.operators import Object, job, running_operator
from tools.cluster.controlplane import ControlPlane

pytestmark = pytest.mark.timeout(300)

FAST = {"scaleOutSeconds": 1, "scaleInSeconds": 3}
REPLICAS = {"min": 1, "max": 3}
SPEC: dict[str, Any] = {
    "rewards": [{"name": "sums", "builtin": "reasoning_gym", "replicas": REPLICAS, "autoscaling": FAST}],
    "environments": [{"name": "lake", "builtin": "frozen_lake", "replicas": {"min": 0, "max": 3}, "autoscaling": FAST}],
    "rollouts": [{"name": "main", "replicas": REPLICAS, "autoscaling": FAST}],
    "runner": {"replicas": REPLICAS, "autoscaling": FAST},
}
TARGETS = {"reward-sums": 8, "environment-lake": 256, "runner": 1024, "rollout-main": 1}
"""Role → load of one replica."""
LEAST = {"reward-sums": 1, "environment-lake": 0, "runner": 1, "rollout-main": 1}


@pytest.fixture
def job_client(cluster: ControlPlane, namespace: str) -> JobClient:
    return JobClient(cluster, namespace)


def operator(job_client: JobClient) -> Any:
    return running_operator(job_client.cluster.kubeconfig, [job_client.namespace])


async def report(job_client: JobClient, replicas: float, engines: list[Object] | None = None) -> None:
    """Report a load of every role that needs a number of replicas."""
    loads = [{"role": role, "load": replicas * target} for role, target in TARGETS.items()]
    await job_client.apply_run("Running", loads=loads, engines=engines or [])


async def scaled(job_client: JobClient, wanted: dict[str, int]) -> None:
    """Wait until roles have so many pods, all ready, and RLJobScales say so."""

    async def reached() -> bool:
        scales = await job_client.children("RLJobScale")
        pods = {role: len(await job_client.pods(role)) for role in wanted}
        asked = {role: scales[name]["spec"]["replicas"] for role in wanted if (name := f"sums-{role}") in scales}
        return pods == asked == wanted

    await job_client.until(reached)


async def start(job_client: JobClient, **spec: Any) -> None:
    await job_client.apply(**{**SPEC, **spec})

    async def pods() -> bool:
        return len(await job_client.pods()) >= 5

    await job_client.until(pods)
    await job_client.apply_run("Running")


async def test_every_role_follows_its_load_out_and_in_and_an_engine_is_drained(job_client: JobClient):
    async with operator(job_client):
        await start(job_client)
        await scaled(job_client, LEAST)
        await report(job_client, 3)
        await scaled(job_client, dict.fromkeys(TARGETS, 3))
        engines = [{"name": pod["metadata"]["name"], "load": 5} for pod in await job_client.pods("rollout-main")]
        await report(job_client, 0, engines)

        async def draining() -> list[str]:
            found: list[str] = (await job_client.status()).get("draining", [])
            return found

        leaving = await job_client.until(draining)
        assert len(await job_client.pods("rollout-main")) == 3, "engines with requests stay until they are drained"
        drained = [engine | {"drained": engine["name"] in leaving} for engine in engines]
        await report(job_client, 0, drained)
        await scaled(job_client, LEAST)
        assert not {pod["metadata"]["name"] for pod in await job_client.pods("rollout-main")} & set(leaving)
        events = await job_client.events()
        assert (events.count("ScaledOut"), events.count("ScaledIn")) == (4, 4), "each role changed twice"
        scale = (await job_client.children("RLJobScale"))["sums-reward-sums"]
        owners = [each["manager"] for each in scale["metadata"]["managedFields"] if "f:replicas" in str(each)]
        assert "rljob-autoscaler" in owners


async def test_a_load_that_changes_faster_than_the_windows_changes_nothing(job_client: JobClient):
    slow = {"scaleOutSeconds": 3600, "scaleInSeconds": 3600}
    async with operator(job_client) as running:
        await start(job_client, rewards=[SPEC["rewards"][0] | {"autoscaling": slow}], environments=[])
        for replicas in (3, 1, 3, 1):
            await job_client.apply_run("Running", loads=[{"role": "reward-sums", "load": replicas * 8}])
            await asyncio.sleep(1.5)
        assert "ScaledOut" not in await job_client.events()
        await running.settled()


async def test_the_operator_leaves_the_replicas_to_kubectl_until_they_are_given_back(job_client: JobClient):
    async with operator(job_client):
        await start(job_client, environments=[])
        await job_client.kubectl("scale", "rljs", "sums-reward-sums", "--replicas=2")

        async def message() -> bool:
            scale = (await job_client.children("RLJobScale"))["sums-reward-sums"]
            return "kubectl has set the replicas" in scale.get("status", {}).get("message", "")

        await job_client.until(message)
        await report(job_client, 3)
        await scaled(job_client, {"runner": 3, "reward-sums": 2})
        await job_client.kubectl("delete", "rljs", "sums-reward-sums")
        await scaled(job_client, {"reward-sums": 3})


async def test_a_new_operator_continues_from_the_replicas_of_the_last_one(job_client: JobClient):
    async with operator(job_client):
        await start(job_client, environments=[])
        await report(job_client, 3)
        await scaled(job_client, {"reward-sums": 3, "runner": 3})
    async with operator(job_client) as running:
        await running.settled()
        await scaled(job_client, {"reward-sums": 3, "runner": 3})
        await report(job_client, 1)
        await scaled(job_client, {"reward-sums": 1, "runner": 1})


# --- KEDA -------------------------------------------------------------------------------------------------------------

KEDA = {"provider": "keda", "keda": {"serverAddress": "http://prometheus.monitoring:9090"}}
CRDS = os.environ.get("RLJOB_THIRD_PARTY_CRDS", "")
NO_CRDS = "RLJOB_THIRD_PARTY_CRDS names no directory with the CustomResourceDefinitions of other projects"


async def test_a_scaled_object_without_keda_is_reported(job_client: JobClient, cluster: ControlPlane):
    async with operator(job_client):
        await start(job_client, rewards=[SPEC["rewards"][0] | {"autoscaling": KEDA}], environments=[])
        message = await job_client.reason("APIRejected")
        assert "the cluster has no type ScaledObject" in message


@pytest.mark.skipif(not CRDS, reason=NO_CRDS)
async def test_the_scaled_object_is_valid_and_follows_the_manifest(job_client: JobClient, cluster: ControlPlane):
    crd = Path(CRDS) / "keda.sh_scaledobjects.yaml"
    await job_client.kubectl("apply", "--server-side", "-f", str(crd))
    path = f"/apis/keda.sh/v1alpha1/namespaces/{job_client.namespace}/scaledobjects"
    try:
        await asyncio.to_thread(
            cluster.api.wait_condition,
            "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/scaledobjects.keda.sh",
            "Established",
        )
        rewards = [SPEC["rewards"][0] | {"autoscaling": KEDA}]
        environments = [SPEC["environments"][0] | {"autoscaling": KEDA | {"scaleInSeconds": 60}}]
        async with operator(job_client):
            await start(job_client, rewards=rewards, environments=environments)

            async def objects() -> dict[str, Object]:
                found = await asyncio.to_thread(cluster.api.list, path)
                return {each["metadata"]["name"]: each for each in found}

            async def both() -> bool:
                return len(await objects()) == 2

            await job_client.until(both)
            found = (await objects())["sums-environment-lake"]
            assert found["spec"]["scaleTargetRef"]["kind"] == "RLJobScale"
            assert found["spec"]["minReplicaCount"] == 0
            strict = {"metadata": {"name": "copy"}, "apiVersion": found["apiVersion"], "kind": found["kind"]}
            await asyncio.to_thread(cluster.api.post, path, strict | {"spec": found["spec"]}, fieldValidation="Strict")
            await asyncio.to_thread(cluster.api.delete, f"{path}/copy")
            environments[0]["autoscaling"]["scaleInSeconds"] = 90  # type: ignore[index]
            await job_client.change(environments=environments)

            async def changed() -> bool:
                return (await objects())["sums-environment-lake"]["spec"]["cooldownPeriod"] == 90

            await job_client.until(changed)
            await report(job_client, 3)  # KEDA's business
            await scaled(job_client, {"runner": 3, "reward-sums": 1})
    finally:
        await job_client.kubectl("delete", "-f", str(crd), "--wait=false")


def test_the_manifests_of_this_file_are_valid():
    assert job("default", **SPEC)["spec"]["runner"]["replicas"] == REPLICAS
