"""Environment services of a job in a real control plane: objects, status, scaling, tokens."""

from __future__ import annotations

import pytest

from e2e.integration.job_lifecycle import JobClient
from e2e.integration.operators import running_operator
from tools.cluster.controlplane import ControlPlane

pytestmark = pytest.mark.timeout(300)

ROLE = "environment-lake"
LAKE = {"name": "lake", "builtin": "frozen_lake", "replicas": {"min": 2, "max": 3}}
FAR = {"name": "far", "url": "http://far"}


async def test_environments_get_ready_and_scaled_as_rewards_do(cluster: ControlPlane, namespace: str) -> None:
    job = JobClient(cluster, namespace)
    async with running_operator(cluster.kubeconfig, [namespace]):
        await job.run_up(environments=[LAKE, FAR])
        assert (await job.status())["ready"]["environment"] == "2/2"
        services = await job.children("Service")
        assert services[f"sums-replicas-{ROLE}"]["spec"]["clusterIP"] == "None"
        assert not any("far" in name for name in services)
        deployment = (await job.children("Deployment"))[f"sums-{ROLE}"]
        [volume] = [each for each in deployment["spec"]["template"]["spec"]["volumes"] if each["name"] == "rljob-token"]
        [secret] = (await job.children("Secret")).values()
        assert {item["key"] for item in volume["secret"]["items"]} == {"environment"} < secret["data"].keys()
        await job.kubectl("scale", "rljs", f"sums-{ROLE}", "--replicas=5")

        async def scaled() -> bool:
            return (await job.role(ROLE)).get("ready") == 3

        await job.until(scaled)
        assert len(await job.pods(ROLE)) == 3
