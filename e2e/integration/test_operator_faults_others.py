"""The operator when other clients change, own, reject or delete its objects: on a real API server with kwok's nodes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from e2e.integration.faulty import InterferingClient
from e2e.integration.job_lifecycle import JobClient
from e2e.integration.operators import Object, running_operator
from rljob.kube.errors import ForbiddenError
from rljob.operator.object_kinds import Resource
from rljob.operator.operator_client import OperatorClient
from tools.cluster.controlplane import ControlPlane

pytestmark = pytest.mark.timeout(300)
LONG_AGO = "2026-01-01T00:00:00Z"


@pytest.fixture
def job_client(cluster: ControlPlane, namespace: str) -> JobClient:
    return JobClient(cluster, namespace)


def operator(job_client: JobClient, **options: Any) -> Any:
    return running_operator(job_client.cluster.kubeconfig, [job_client.namespace], **options)


async def write_status(job_client: JobClient, status: Object) -> None:
    """Write fields of the status as a program that restores backups does."""
    how = ("--subresource=status", "--type=merge", "--field-manager=velero-server")
    await job_client.kubectl("patch", "rljob", job_client.name, *how, "-p", json.dumps({"status": status}))


async def test_obsolete_status_fields_of_another_manager_are_removed(job_client: JobClient):
    async with operator(job_client) as running:
        await job_client.run_up(failurePolicy={"pendingSeconds": 1000})
        await running.idle()
        times = ("pendingSince", "drainingSince", "suspendedAt")
        await write_status(job_client, {**dict.fromkeys(times, LONG_AGO), "draining": ["nobody"]})

        async def cleared() -> bool:
            status = await job_client.status()
            return not any(status.get(name) for name in (*times, "draining"))

        await job_client.until(cleared)
        await running.idle()
        before = running.writes
        await job_client.kubectl("label", "rljob", "sums", "poke=1")
        await running.sees(await job_client.body())
        await running.settled()
        assert running.writes == before, "a job in its desired state is not written"
        assert (await job_client.status())["trainer"]["number"] == 1


async def test_a_job_that_was_restored_while_suspended_is_resumed_once(job_client: JobClient):
    async with operator(job_client):
        await job_client.apply(suspend=True)
        await job_client.reason("Suspended")
        saved = await job_client.body()
    await job_client.delete()
    saved["metadata"] = {"name": "sums", "namespace": job_client.namespace}
    status = saved.pop("status")
    await asyncio.to_thread(job_client.cluster.api.create, saved)
    await write_status(job_client, status)
    async with operator(job_client) as running:
        await job_client.reason("Suspended")
        await job_client.change(suspend=False)
        await job_client.ready_pods()
        await running.idle()
        now = await job_client.status()
        assert not now.get("suspendedAt") and now["trainer"]["number"] <= 2


async def test_a_foreign_object_with_the_label_of_the_job_is_reported_without_repeated_writes(job_client: JobClient):
    mine = {"metadata": {"name": "sums-job", "namespace": job_client.namespace}, "data": {"a": "b"}}
    await asyncio.to_thread(job_client.cluster.api.create, {"apiVersion": "v1", "kind": "ConfigMap", **mine})
    async with operator(job_client) as running:
        await job_client.apply()
        await job_client.reason("NameConflict")
        await job_client.kubectl("label", "configmap", "sums-job", "rljob.dev/job=sums")
        await running.settled()
        assert "ConfigMap sums-job" in await job_client.reason("NameConflict")
        await job_client.kubectl("delete", "configmap", "sums-job")
        await job_client.ready_pods()


class RejectingClient(OperatorClient):
    """Rejects patches of pods and deletions of StatefulSets."""

    rejects = True

    async def send(self, verb: str, method: str, resource: Resource, path: str, *rest: Any) -> bytes:
        if self.rejects and (method, resource.plural) in (("PATCH", "pods"), ("DELETE", "statefulsets")):
            raise ForbiddenError(403, "Forbidden", "denied by a policy of the cluster")
        return await super().send(verb, method, resource, path, *rest)


async def test_without_the_right_to_patch_pods_everything_else_continues(job_client: JobClient):
    async with operator(job_client, client=RejectingClient):
        await job_client.run_up()
        for count in (4, 3):
            await job_client.kubectl("scale", "rljobscale", "sums-rollout-main", f"--replicas={count}")

            async def scaled(count: int = count) -> bool:
                role = await job_client.role("rollout-main")
                return role["ready"] == role["desired"] == count

            await job_client.until(scaled)
        await job_client.change(runner={"template": {"metadata": {"annotations": {"a": "b"}}}})

        async def changed() -> bool:
            runner = (await job_client.children("Deployment"))["sums-runner"]
            return runner["spec"]["template"]["metadata"].get("annotations", {}).get("a") == "b"

        await job_client.until(changed)


async def test_a_rejected_deletion_blocks_nothing_else_and_is_retried(job_client: JobClient):
    async with operator(job_client, client=RejectingClient) as running:
        await job_client.run_up()
        await job_client.change(suspend=True)
        await job_client.apply_run("Suspended")
        await job_client.no_pods("coordinator")

        async def status_updated() -> bool:
            return (await job_client.role("runner"))["ready"] == 0

        await job_client.until(status_updated)
        await job_client.reason("Suspending", "Suspended")
        await running.settled()
        running.client.rejects = False
        await job_client.reason("Suspended", "Suspended")
        assert not await job_client.pods()


async def test_a_secret_that_cannot_be_created_is_reported_and_nothing_starts_without_it(job_client: JobClient):
    quota: Object = {"apiVersion": "v1", "kind": "ResourceQuota", "spec": {"hard": {"secrets": "0"}}}
    quota["metadata"] = {"name": "none", "namespace": job_client.namespace}
    api, path = job_client.cluster.api, f"/api/v1/namespaces/{job_client.namespace}/resourcequotas/none"
    await asyncio.to_thread(api.create, quota)
    await asyncio.to_thread(api.wait_for, lambda: "hard" in api.get(path).get("status", {}), 120)
    async with operator(job_client) as running:
        await job_client.apply()
        assert "Secret sums-tokens-" in await job_client.reason("QuotaExceeded")
        await running.idle()
        assert not await job_client.children("Deployment") and not await job_client.pods()
        await asyncio.to_thread(api.delete, path)
        await job_client.ready_pods()


async def test_after_the_secret_was_deleted_all_pods_are_replaced_with_the_new_tokens(job_client: JobClient):
    async with operator(job_client) as running:
        await job_client.run_up()
        await running.idle()
        old = {pod["metadata"]["uid"] for pod in await job_client.pods()}
        (name,) = [name for name in await job_client.children("Secret") if name.startswith("sums-tokens-")]
        await job_client.kubectl("delete", "secret", name)
        await job_client.kubectl("delete", "deployment", "sums-runner")  # the Secret is needed only to create pods

        async def renewed() -> bool:
            pods = await job_client.pods()
            return bool(pods) and not old & {pod["metadata"]["uid"] for pod in pods}

        await job_client.until(renewed)
        await job_client.ready_pods()
        await running.idle()
        status = await job_client.status()
        assert (status["trainer"]["number"], status["trainer"]["charged"]) == (2, 0)


async def test_a_scale_concurrent_with_a_change_of_the_template_is_not_lost(job_client: JobClient):
    async with operator(job_client, client=InterferingClient) as running:
        await job_client.run_up()
        await running.idle()
        scaled = False

        async def interfere(verb: str, path: str, body: Mapping[str, Any] | None) -> None:
            nonlocal scaled
            if verb == "apply" and path.endswith("/rljobscales/sums-rollout-main") and not scaled:
                scaled = True
                await job_client.kubectl("scale", "rljobscale", "sums-rollout-main", "--replicas=4")

        running.client.interfere = interfere
        template = {"metadata": {"annotations": {"a": "b"}}}
        await job_client.change(rollouts=[{"name": "main", "replicas": {"min": 2, "max": 4}, "template": template}])

        async def four() -> bool:
            role = await job_client.role("rollout-main")
            return scaled and role["ready"] == role["desired"] == 4

        await job_client.until(four)
        await running.idle()
        assert (await job_client.children("RLJobScale"))["sums-rollout-main"]["spec"]["replicas"] == 4


@pytest.mark.parametrize("label", ["rljob.dev/job-", "rljob.dev/job=other"], ids=["removed", "another"])
async def test_a_changed_label_of_a_child_is_restored(job_client: JobClient, label: str):
    async with operator(job_client) as running:
        await job_client.run_up()
        await running.idle()
        before = {kind: (await job_client.children(kind)) for kind in ("Service", "Deployment")}
        for kind, name in (("service", "sums-coordinator"), ("deployment", "sums-runner")):
            await job_client.kubectl("label", kind, name, label, "--overwrite")

        async def labelled() -> bool:
            found = {kind: await job_client.children(kind) for kind in before}
            return all(found[kind].keys() == before[kind].keys() for kind in before)

        await job_client.until(labelled)
        found = {kind: await job_client.children(kind) for kind in before}
        for kind, children in before.items():
            assert {name: each["metadata"]["uid"] for name, each in found[kind].items()} == {
                name: each["metadata"]["uid"] for name, each in children.items()
            }


async def test_an_edited_child_without_its_annotations_is_restored(job_client: JobClient):
    async with operator(job_client) as running:
        await job_client.run_up()
        await running.idle()
        await job_client.kubectl("annotate", "deployment", "sums-runner", "rljob.dev/rendered-hash-")
        insecure = {"name": "main", "securityContext": {"allowPrivilegeEscalation": None}}
        spec = {"automountServiceAccountToken": None, "containers": [insecure]}
        path = "/apis/apps/v1/namespaces/" + job_client.namespace + "/deployments/sums-runner"
        await asyncio.to_thread(job_client.cluster.api.patch, path, {"spec": {"template": {"spec": spec}}}, "strategic")

        async def restored() -> bool:
            runner = (await job_client.children("Deployment"))["sums-runner"]
            pod = runner["spec"]["template"]["spec"]
            safe = pod["containers"][0].get("securityContext", {}).get("allowPrivilegeEscalation") is False
            marked = "rljob.dev/rendered-hash" in runner["metadata"]["annotations"]
            return marked and safe and pod.get("automountServiceAccountToken") is False

        await job_client.until(restored)
        await running.idle()
