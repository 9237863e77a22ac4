"""The operator when others change, own, refuse or delete what is its own: on a real API server, with kwok's nodes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from e2e.integration.faulty import MeddlingClient
from e2e.integration.job_lifecycle import Life
from e2e.integration.operators import Object, running_operator
from rljob.kube.errors import ForbiddenError
from rljob.operator.client import OperatorClient
from rljob.operator.resources import Resource
from tools.cluster.controlplane import ControlPlane

pytestmark = pytest.mark.timeout(300)
LONG_AGO = "2026-01-01T00:00:00Z"


@pytest.fixture
def life(cluster: ControlPlane, namespace: str) -> Life:
    return Life(cluster, namespace)


def operator(life: Life, **options: Any) -> Any:
    return running_operator(life.cluster.kubeconfig, [life.namespace], **options)


async def write_status(life: Life, status: Object) -> None:
    """Write fields of the status as a program that restores backups does."""
    how = ("--subresource=status", "--type=merge", "--field-manager=velero-server")
    await life.kubectl("patch", "rljob", life.name, *how, "-p", json.dumps({"status": status}))


async def test_what_shall_not_be_in_the_status_goes_though_another_manager_wrote_it(life: Life):
    async with operator(life) as running:
        await life.run_up(failurePolicy={"pendingSeconds": 1000})
        await running.idle()
        times = ("pendingSince", "drainingSince", "suspendedAt")
        await write_status(life, {**dict.fromkeys(times, LONG_AGO), "draining": ["nobody"]})

        async def cleared() -> bool:
            status = await life.status()
            return not any(status.get(name) for name in (*times, "draining"))

        await life.until(cleared)
        await running.idle()
        before = running.writes
        await life.kubectl("label", "rljob", "sums", "poke=1")
        await running.sees(await life.body())
        await running.settled()
        assert running.writes == before, "a job that is as it shall be is not written"
        assert (await life.status())["trainer"]["number"] == 1


async def test_a_job_that_was_restored_while_suspended_is_resumed_once(life: Life):
    async with operator(life):
        await life.apply(suspend=True)
        await life.reason("Suspended")
        saved = await life.body()
    await life.delete()
    saved["metadata"] = {"name": "sums", "namespace": life.namespace}
    status = saved.pop("status")
    await asyncio.to_thread(life.cluster.api.create, saved)
    await write_status(life, status)
    async with operator(life) as running:
        await life.reason("Suspended")
        await life.change(suspend=False)
        await life.ready_pods()
        await running.idle()
        now = await life.status()
        assert not now.get("suspendedAt") and now["trainer"]["number"] <= 2


async def test_a_foreign_object_that_is_labelled_as_the_jobs_is_reported_and_costs_nothing(life: Life):
    mine = {"metadata": {"name": "sums-job", "namespace": life.namespace}, "data": {"a": "b"}}
    await asyncio.to_thread(life.cluster.api.create, {"apiVersion": "v1", "kind": "ConfigMap", **mine})
    async with operator(life) as running:
        await life.apply()
        await life.reason("NameConflict")
        await life.kubectl("label", "configmap", "sums-job", "rljob.dev/job=sums")
        await running.settled()
        assert "ConfigMap sums-job" in await life.reason("NameConflict")
        await life.kubectl("delete", "configmap", "sums-job")
        await life.ready_pods()


class Refusing(OperatorClient):
    """Pods may not be patched, StatefulSets not be deleted."""

    refuses = True

    async def send(self, verb: str, method: str, resource: Resource, path: str, *rest: Any) -> bytes:
        if self.refuses and (method, resource.plural) in (("PATCH", "pods"), ("DELETE", "statefulsets")):
            raise ForbiddenError(403, "Forbidden", "denied by a policy of the cluster")
        return await super().send(verb, method, resource, path, *rest)


async def test_where_pods_may_not_be_marked_the_rest_goes_on(life: Life):
    async with operator(life, client=Refusing):
        await life.run_up()
        for count in (4, 3):
            await life.kubectl("scale", "rljobscale", "sums-rollout-main", f"--replicas={count}")

            async def scaled(count: int = count) -> bool:
                role = await life.role("rollout-main")
                return role["ready"] == role["desired"] == count

            await life.until(scaled)
        await life.change(runner={"template": {"metadata": {"annotations": {"a": "b"}}}})

        async def changed() -> bool:
            runner = (await life.children("Deployment"))["sums-runner"]
            return runner["spec"]["template"]["metadata"].get("annotations", {}).get("a") == "b"

        await life.until(changed)


async def test_a_deletion_that_is_refused_holds_up_nothing_else_and_is_tried_again(life: Life):
    async with operator(life, client=Refusing) as running:
        await life.run_up()
        await life.change(suspend=True)
        await life.tell("Suspended")
        await life.no_pods("coordinator")

        async def told() -> bool:
            return (await life.role("runner"))["ready"] == 0

        await life.until(told)
        await life.reason("Suspending", "Suspended")
        await running.settled()
        running.client.refuses = False
        await life.reason("Suspended", "Suspended")
        assert not await life.pods()


async def test_a_secret_that_cannot_be_made_is_reported_and_nothing_starts_without_it(life: Life):
    quota: Object = {"apiVersion": "v1", "kind": "ResourceQuota", "spec": {"hard": {"secrets": "0"}}}
    quota["metadata"] = {"name": "none", "namespace": life.namespace}
    api, path = life.cluster.api, f"/api/v1/namespaces/{life.namespace}/resourcequotas/none"
    await asyncio.to_thread(api.create, quota)
    await asyncio.to_thread(api.wait_for, lambda: "hard" in api.get(path).get("status", {}), 120)
    async with operator(life) as running:
        await life.apply()
        assert "Secret sums-tokens-" in await life.reason("QuotaExceeded")
        await running.idle()
        assert not await life.children("Deployment") and not await life.pods()
        await asyncio.to_thread(api.delete, path)
        await life.ready_pods()


async def test_when_the_secret_was_deleted_all_pods_are_made_anew_with_the_new_tokens(life: Life):
    async with operator(life) as running:
        await life.run_up()
        await running.idle()
        old = {pod["metadata"]["uid"] for pod in await life.pods()}
        (name,) = [name for name in await life.children("Secret") if name.startswith("sums-tokens-")]
        await life.kubectl("delete", "secret", name)
        await life.kubectl("delete", "deployment", "sums-runner")  # only to make pods is it missed

        async def renewed() -> bool:
            pods = await life.pods()
            return bool(pods) and not old & {pod["metadata"]["uid"] for pod in pods}

        await life.until(renewed)
        await life.ready_pods()
        await running.idle()
        status = await life.status()
        assert (status["trainer"]["number"], status["trainer"]["charged"]) == (2, 0)


async def test_a_scale_beside_a_change_of_the_template_is_not_lost(life: Life):
    async with operator(life, client=MeddlingClient) as running:
        await life.run_up()
        await running.idle()
        scaled = False

        async def meddle(verb: str, path: str, body: Mapping[str, Any] | None) -> None:
            nonlocal scaled
            if verb == "apply" and path.endswith("/rljobscales/sums-rollout-main") and not scaled:
                scaled = True
                await life.kubectl("scale", "rljobscale", "sums-rollout-main", "--replicas=4")

        running.client.meddle = meddle
        template = {"metadata": {"annotations": {"a": "b"}}}
        await life.change(rollouts=[{"name": "main", "replicas": {"min": 2, "max": 4}, "template": template}])

        async def four() -> bool:
            role = await life.role("rollout-main")
            return scaled and role["ready"] == role["desired"] == 4

        await life.until(four)
        await running.idle()
        assert (await life.children("RLJobScale"))["sums-rollout-main"]["spec"]["replicas"] == 4


@pytest.mark.parametrize("label", ["rljob.dev/job-", "rljob.dev/job=other"], ids=["removed", "another"])
async def test_a_child_whose_label_is_taken_away_gets_it_back(life: Life, label: str):
    async with operator(life) as running:
        await life.run_up()
        await running.idle()
        before = {kind: (await life.children(kind)) for kind in ("Service", "Deployment")}
        for kind, name in (("service", "sums-coordinator"), ("deployment", "sums-runner")):
            await life.kubectl("label", kind, name, label, "--overwrite")

        async def labelled() -> bool:
            found = {kind: await life.children(kind) for kind in before}
            return all(found[kind].keys() == before[kind].keys() for kind in before)

        await life.until(labelled)
        found = {kind: await life.children(kind) for kind in before}
        for kind, children in before.items():
            assert {name: each["metadata"]["uid"] for name, each in found[kind].items()} == {
                name: each["metadata"]["uid"] for name, each in children.items()
            }


async def test_an_edited_child_without_its_annotations_is_put_right(life: Life):
    async with operator(life) as running:
        await life.run_up()
        await running.idle()
        await life.kubectl("annotate", "deployment", "sums-runner", "rljob.dev/rendered-hash-")
        insecure = {"name": "main", "securityContext": {"allowPrivilegeEscalation": None}}
        spec = {"automountServiceAccountToken": None, "containers": [insecure]}
        path = "/apis/apps/v1/namespaces/" + life.namespace + "/deployments/sums-runner"
        await asyncio.to_thread(life.cluster.api.patch, path, {"spec": {"template": {"spec": spec}}}, "strategic")

        async def restored() -> bool:
            runner = (await life.children("Deployment"))["sums-runner"]
            pod = runner["spec"]["template"]["spec"]
            safe = pod["containers"][0].get("securityContext", {}).get("allowPrivilegeEscalation") is False
            marked = "rljob.dev/rendered-hash" in runner["metadata"]["annotations"]
            return marked and safe and pod.get("automountServiceAccountToken") is False

        await life.until(restored)
        await running.idle()
