"""An HPA of Kubernetes scales a role of a job by an external metric; the operator keeps off."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import yaml

from e2e.integration.job_lifecycle import JobClient
from e2e.integration.metrics_double import external_metrics
from e2e.integration.operators import running_operator
from tools.cluster.controlplane import ControlPlane

pytestmark = pytest.mark.timeout(300)

PAGE = Path(__file__).parents[2] / "docs" / "kubernetes.md"
REWARD = {
    "name": "sums",
    "builtin": "reasoning_gym",
    "replicas": {"min": 1, "max": 4},
    "autoscaling": {"scaleOutSeconds": 1, "scaleInSeconds": 1},
}


def documented() -> dict:
    """Return the HPA of the page, for the reward of this test and without its windows."""
    text = next(block for block in PAGE.read_text().split("```") if "HorizontalPodAutoscaler" in block)
    body = yaml.safe_load(text.partition("\n")[2].replace("quickstart", "sums").replace("reward-exact", "reward-sums"))
    at_once = {"stabilizationWindowSeconds": 0}
    body["spec"]["behavior"] = {"scaleUp": at_once, "scaleDown": at_once}
    return body


async def test_the_hpa_of_the_page_scales_a_reward_out_and_in(cluster: ControlPlane, namespace: str, tmp_path: Path):
    job_client = JobClient(cluster, namespace)

    async def pods(count: int) -> None:
        async def there() -> bool:
            return len(await job_client.pods("reward-sums")) == count

        await job_client.until(there, 200)

    async with running_operator(cluster.kubeconfig, [namespace]):
        await job_client.apply(rewards=[REWARD])
        await job_client.ready_pods()
        with external_metrics(cluster, namespace, tmp_path) as metrics:
            metrics.value = 24
            path = f"/apis/autoscaling/v2/namespaces/{namespace}/horizontalpodautoscalers"
            await asyncio.to_thread(cluster.api.post, path, documented(), fieldValidation="Strict")
            await pods(3)
            assert metrics.queries[0].endswith(f"/namespaces/{namespace}/rljob_role_load")
            await job_client.apply_run("Running", loads=[{"role": "reward-sums", "load": 0}])
            scale = (await job_client.children("RLJobScale"))["sums-reward-sums"]
            assert "kube-controller-manager has set the replicas" in scale["status"]["message"]
            metrics.value = 8
            await pods(1)
            hpa = await asyncio.to_thread(cluster.api.get, f"{path}/sums-reward-sums")
            conditions = {each["type"]: each["status"] for each in hpa["status"]["conditions"]}
            assert conditions["AbleToScale"] == conditions["ScalingActive"] == "True"
