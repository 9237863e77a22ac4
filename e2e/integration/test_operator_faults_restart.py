"""Operators that are killed, replaced, duplicated or down, and clock steps: on a real API server."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import os
import time
from typing import Any

import pytest

from e2e.faults.cases import THOROUGH
from e2e.integration.faulty import crashing_client
from e2e.integration.namespace import NamespaceClient
from e2e.integration.operators import Object, OperatorProcess, RunningOperator, job
from rljob.manifests import render
from rljob.manifests.hashes import rendered_hash
from rljob.manifests.names import RENDERED_HASH
from rljob.operator.object_kinds import CHILDREN, PODS, SECRETS
from rljob.operator.planning import Rendering, plan
from tools.cluster.client import ApiError
from tools.cluster.controlplane import ControlPlane

pytestmark = pytest.mark.timeout(300)

CRASHES = {"after": True, "before": False} if os.environ.get(THOROUGH) else {"after": True}
"""Whether an operator crashes after or before a write. `make test` tries one: the operator has no other state, so a
crash after one write is the same as a crash before the following one."""


@pytest.fixture
def ns(cluster: ControlPlane, namespace: str) -> NamespaceClient:
    return NamespaceClient(cluster, namespace)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("after", CRASHES.values(), ids=CRASHES)
async def test_after_a_kill_at_any_write_the_next_operator_converges_to_the_same_state(
    cluster: ControlPlane, ns: NamespaceClient, after: bool
):
    async with ns.operator() as operator:
        await ns.create(job(ns.name))
        await ns.wait_until_ready()
        await operator.idle()
        expected = await ns.rendered_state()

    async def all_written(here: NamespaceClient, first: RunningOperator) -> None:
        await here.wait_until_ready()
        await first.idle(quiet=3.0)

    async def killed_at(at: int) -> bool:
        """Return whether the operator sent ``at`` writes and crashed at the last one."""
        here = NamespaceClient(cluster, await asyncio.to_thread(cluster.namespace))
        async with here.operator(client=crashing_client(at, after)) as first:
            await here.create(job(here.name))
            done = asyncio.create_task(all_written(here, first))
            crashed = asyncio.create_task(first.client.crashed.wait())
            await asyncio.wait([done, crashed], return_when=asyncio.FIRST_COMPLETED)
            reached = first.client.crashed.is_set()
            if not reached:
                done.result()
            done.cancel()
            crashed.cancel()
            await first.kill()
        await here.drop_lease()
        jobs = await here.uids("Job")
        async with here.operator() as second:
            try:
                await here.wait_until_ready()
            except AssertionError as error:
                raise AssertionError(
                    f"killed at write {at}: {first.client.last}; {error}; {await here.rendered_state()}"
                ) from error
            await second.idle(quiet=0.5)

            async def same() -> bool:
                return await here.rendered_state() == expected

            try:
                await here.until(same)
            except AssertionError:
                assert await here.rendered_state() == expected, f"killed at write {at}: {first.client.last}"
        assert jobs.items() <= (await here.uids("Job")).items(), "no trainer's Job was made twice"
        await asyncio.to_thread(cluster.api.delete, f"/api/v1/namespaces/{here.name}")
        return reached

    crashes, alive, together = 0, 0, 4
    while not alive:
        crashed = await asyncio.gather(*(killed_at(crashes + 1 + i) for i in range(together)))
        crashes, alive = crashes + sum(crashed), crashed.count(False)
    # The number of status writes depends on the order of events; the number of created objects does not.
    made = sum("/" in name for name in expected) + expected["secrets"]
    assert crashes > made, f"one write for each of the {made} objects, and at least one status write"


async def test_of_two_operators_one_acts_and_the_other_takes_over_when_it_is_killed(ns: NamespaceClient, tmp_path):
    with (
        OperatorProcess(ns.cluster.kubeconfig, [ns.name], tmp_path) as first,
        OperatorProcess(ns.cluster.kubeconfig, [ns.name], tmp_path) as second,
    ):

        async def leader() -> OperatorProcess | None:
            leading = [each for each in (first, second) if await each.metric("rljob_operator_leader") == 1.0]
            assert len(leading) <= 1
            return leading[0] if leading else None

        leads = await ns.until(leader)
        standby = second if leads is first else first
        await ns.create(job(ns.name))
        await ns.wait_until_ready()
        assert await standby.text("/readyz") == "ok\n", "the standby is ready"
        # It may have tried to create the Lease, which the other one had created just before: 409.
        assert 'code="201",verb="create"' not in await standby.text("/metrics")
        leads.kill()
        await ns.delete("Service", "sums-coordinator")

        async def taken_over() -> Any:
            assert standby.process.poll() is None, f"the standby has exited: {standby.log.read_text()[-2000:]}"
            return await ns.get("Service", "sums-coordinator")

        await ns.until(taken_over)
        assert standby.terminate() == 0
        lease = f"/apis/coordination.k8s.io/v1/namespaces/{ns.name}/leases/rljob-operator"
        assert not (await asyncio.to_thread(ns.cluster.api.get, lease))["spec"].get("holderIdentity")


async def test_an_operator_that_loses_its_lease_exits_and_writes_nothing_more(ns: NamespaceClient, tmp_path):
    with OperatorProcess(ns.cluster.kubeconfig, [ns.name], tmp_path) as process:
        await process.wait_leader()
        lease = f"/apis/coordination.k8s.io/v1/namespaces/{ns.name}/leases/rljob-operator"
        stolen = {"spec": {"holderIdentity": "another-operator"}}
        await asyncio.to_thread(ns.cluster.api.patch, lease, stolen)
        assert await asyncio.to_thread(process.process.wait, 60) == 1
        assert "lease" in process.log.read_text()


@pytest.mark.parametrize("step", [-86_400.0, 86_400.0], ids=["back", "forward"])
async def test_a_step_of_the_clock_restarts_and_ends_nothing(ns: NamespaceClient, step: float):
    offset = 0.0
    async with ns.operator(wall=lambda: time.time() + offset) as operator:
        await ns.create(job(ns.name))
        await ns.wait_until_ready()
        await operator.idle()
        pods, writes = await ns.uids("Pod"), operator.writes
        offset = step
        for i in range(3):
            await operator.sees(await ns.patch("RLJob", "sums", {"metadata": {"labels": {"n": str(i)}}}))
            await operator.settled()
        assert await ns.uids("Pod") == pods
        assert operator.writes == writes


async def test_an_idle_operator_writes_only_the_lease(ns: NamespaceClient):
    async with ns.operator() as operator:
        await ns.create(job(ns.name))
        await ns.wait_until_ready()
        await operator.idle()
        await operator.sees(await run(ns, 0))
        await operator.idle()
        writes, leases = operator.writes, operator.client.writes["update leases"]

        async def renewed() -> bool:
            return operator.client.writes["update leases"] > leases

        for i in range(1, 15):
            await operator.sees(await run(ns, i))
            await operator.settled()
        await ns.until(renewed)
        assert operator.writes == writes


async def run(ns: NamespaceClient, step: int) -> Object:
    """Apply status.run as a coordinator does; return the RLJob with it."""
    body = {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "sums"},
        "status": {
            "run": {
                "state": "Running",
                "progress": {"step": step, "steps": 5, "text": f"{step}/5"},
                "observedGeneration": 1,
            }
        },
    }
    path = ns.path("RLJob", "sums", "status")
    return await asyncio.to_thread(ns.cluster.api.apply, path, body, "rljob-coordinator")


class OlderPlanner:
    """The planner of another version of the operator, which renders other images and pods."""

    def __init__(self) -> None:
        self.rendering = Rendering(self.render)

    def __call__(self, observed: Any, cluster: Any) -> Any:
        return plan(observed, cluster, self.rendering)

    def forget(self, uid: str) -> None:
        self.rendering.forget(uid)

    @staticmethod
    def render(of: Any, context: Any) -> Any:

        roles = []
        for role in render(of, context):
            objects = copy.deepcopy(role.objects)
            for body in objects:
                pod = body.get("spec", {}).get("template", {}).get("spec")
                if pod is not None:
                    pod["containers"][0]["image"] += ":older"
                    pod["containers"][0].setdefault("env", []).append({"name": "OLDER", "value": "1"})
                    body["metadata"]["annotations"].pop(RENDERED_HASH)
                    body["metadata"]["annotations"][RENDERED_HASH] = rendered_hash(body)
            roles.append(dataclasses.replace(role, objects=tuple(objects)))
        return roles


async def test_an_operator_of_another_version_changes_no_pod_until_a_role_is_restarted(ns: NamespaceClient):
    async with ns.operator(planner=OlderPlanner()) as older:
        await ns.create(job(ns.name))
        await ns.wait_until_ready()
        await older.idle()
        pods = await ns.uids("Pod")
    async with ns.operator() as newer:
        await newer.settled()
        assert await ns.uids("Pod") == pods
        assert not any("deployments" in what or "jobs" in what.split()[1:] for what in newer.writes)
        # A change of the runner's fields restarts only the runner, with the pod that the newer version renders.
        template = {"spec": {"containers": [{"name": "main", "env": [{"name": "MINE", "value": "1"}]}]}}
        await ns.patch("RLJob", "sums", {"spec": {"runner": {"template": template}}})

        async def renewed() -> bool:
            main = (await ns.get("Deployment", "sums-runner"))["spec"]["template"]["spec"]["containers"][0]
            names = {entry["name"] for entry in main["env"]}
            return not main["image"].endswith(":older") and "MINE" in names and "OLDER" not in names

        await ns.until(renewed)
        await ns.wait_until_ready()
        await newer.idle()
        left = await ns.uids("Pod")
        gone = {name for name in pods if name not in left}
        assert gone and all("runner" in name for name in gone)


async def test_replicas_are_set_in_what_another_version_rendered(ns: NamespaceClient):
    async with ns.operator(planner=OlderPlanner()) as older:
        await ns.create(job(ns.name))
        await ns.wait_until_ready()
        await older.idle()
        pods = await ns.uids("Pod")
    async with ns.operator():
        await ns.patch("RLJob", "sums", {"spec": {"rollouts": [{"name": "main", "replicas": {"min": 3, "max": 4}}]}})

        async def three() -> bool:
            return (await ns.get("Deployment", "sums-rollout-main"))["spec"]["replicas"] == 3

        await ns.until(three)
        await ns.wait_until_ready()
        assert pods.items() <= (await ns.uids("Pod")).items()


async def test_a_job_of_a_hundred_kilobytes_is_reconciled(ns: NamespaceClient):
    environment = [{"name": f"TEXT_{i}", "value": "x" * 4000} for i in range(25)]
    template = {"spec": {"containers": [{"name": "main", "env": environment}]}}
    async with ns.operator() as operator:
        await ns.create(job(ns.name, runner={"template": template}))
        await ns.wait_until_ready()
        await operator.idle()
        writes = operator.writes
        await operator.sees(await ns.patch("RLJob", "sums", {"metadata": {"labels": {"a": "b"}}}))
        await operator.settled()
        assert operator.writes == writes


async def test_a_burst_of_spec_changes_ends_at_the_last_of_them(ns: NamespaceClient):
    async with ns.operator() as operator:
        await ns.create(job(ns.name, rollouts=[{"name": "main", "replicas": {"min": 2, "max": 2}}]))
        await ns.wait_until_ready()
        for count in (5, 3):
            pools = [{"name": "main", "replicas": {"min": count, "max": count}}]
            await ns.patch("RLJob", "sums", {"spec": {"rollouts": pools}})

        async def settled() -> bool:
            roles = {role["name"]: role for role in (await ns.status())["roles"]}
            replicas = (await ns.get("Deployment", "sums-rollout-main"))["spec"]["replicas"]
            return replicas == 3 and (roles["rollout-main"]["ready"], roles["rollout-main"]["desired"]) == (3, 3)

        await ns.until(settled)
        await operator.idle()
        pods = [name for name in await ns.uids("Pod") if "rollout" in name]
        assert len(pods) == 3


async def test_changes_while_the_operator_was_down_are_reconciled(ns: NamespaceClient):
    async with ns.operator() as operator:
        for i in range(4):
            await ns.create(job(ns.name, f"sums-{i}"))
        for i in range(4):
            await ns.wait_until_ready(f"sums-{i}")
        await operator.idle()
    await ns.delete("Service", "sums-0-coordinator")
    await ns.delete("Deployment", "sums-1-runner")
    await ns.delete("ConfigMap", "sums-2-job")
    pools = [{"name": "main", "replicas": {"min": 3, "max": 4}}]
    await ns.patch("RLJob", "sums-3", {"spec": {"rollouts": pools}})
    await ns.delete("RLJob", "sums-0")
    await ns.create(job(ns.name, "sums-4"))
    async with ns.operator():

        async def reconciled() -> bool:
            scaled = (await ns.get("Deployment", "sums-3-rollout-main"))["spec"]["replicas"] == 3
            return scaled and bool(await ns.get("Deployment", "sums-1-runner"))

        await ns.until(reconciled)
        await ns.until(lambda: ns.get("ConfigMap", "sums-2-job"))
        for i in range(1, 5):
            await ns.wait_until_ready(f"sums-{i}")


async def test_a_job_that_is_deleted_while_the_operator_is_down_leaves_only_its_claim(ns: NamespaceClient):
    async with ns.operator() as operator:
        await ns.create(job(ns.name))
        await ns.wait_until_ready()
        await operator.idle()
    await ns.delete("RLJob", "sums")

    async def gone() -> bool:
        left = [
            f"{resource.kind}/{body['metadata']['name']}"
            for resource in (*CHILDREN, PODS, SECRETS)
            for body in await asyncio.to_thread(ns.cluster.api.list, resource.path(ns.name))
            if body["metadata"]["name"].startswith("sums-")
        ]
        return left == ["PersistentVolumeClaim/sums-storage"]

    await ns.until(gone)


async def test_a_job_created_again_while_the_old_one_is_being_deleted_starts(ns: NamespaceClient):
    async with ns.operator() as operator:
        await ns.create(job(ns.name))
        await ns.wait_until_ready()
        await operator.idle()
        old = await ns.get("RLJob", "sums")
        await ns.delete("RLJob", "sums")
        while True:
            try:
                new = await ns.create(job(ns.name))
                break
            except ApiError:
                await asyncio.sleep(0.1)
        assert new["metadata"]["uid"] != old["metadata"]["uid"]
        await ns.wait_until_ready()
        for resource in CHILDREN:
            for body in await ns.list(resource.kind):
                for owner in body["metadata"].get("ownerReferences", ()):
                    assert owner["uid"] != old["metadata"]["uid"] or "deletionTimestamp" in body["metadata"]


async def test_the_operator_serves_its_health_and_metrics(ns: NamespaceClient, tmp_path):
    with OperatorProcess(ns.cluster.kubeconfig, [ns.name], tmp_path) as process:
        await process.wait_leader()
        await ns.create(job(ns.name))
        await ns.wait_until_ready()
        assert (await process.health() or {})["leader"] is True
        text = await process.text("/metrics") or ""
        assert 'rljob_operator_jobs{condition="Initialized",status="True"} 1.0' in text
        assert 'rljob_operator_api_requests_total{code="201",verb="create"}' in text
        assert 'rljob_operator_reconcile_seconds_count{result="done"}' in text
        assert 'rljob_operator_cached_objects{resource="rljobs"} 1.0' in text
        assert "sums" not in text, "no job's name is a label"
