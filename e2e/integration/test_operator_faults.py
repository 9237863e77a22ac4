"""The operator with failing requests, watches and caches: on a real API server, with nodes simulated by kwok."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import pytest

from e2e.integration.faulty import BreakingClient, HoldingClient, InterferingClient, PagingClient, unreliable
from e2e.integration.namespace import NamespaceClient
from e2e.integration.operators import Object, job, running_operator
from rljob.operator.object_kinds import CHILDREN
from tools.cluster.controlplane import ControlPlane

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def ns(cluster: ControlPlane, namespace: str) -> NamespaceClient:
    return NamespaceClient(cluster, namespace)


async def test_deleted_children_are_created_again(ns: NamespaceClient):
    async with ns.operator() as operator:
        await ns.create(job(ns.name))
        await ns.wait_until_ready()
        await operator.idle()
        before = {resource.kind: await ns.uids(resource.kind) for resource in CHILDREN}
        lasting = {"Job", "PersistentVolumeClaim"}  # a trainer's Job returns as the next attempt; pods protect a claim
        to_delete = [
            (kind, name)
            for kind, uids in before.items()
            for name in uids
            if name.startswith("sums-") and kind not in lasting
        ]
        assert len({kind for kind, _ in to_delete}) == len(CHILDREN) - len(lasting)
        for kind, name in to_delete:
            await ns.delete(kind, name)

        async def all_back() -> bool:
            return all(
                [(await ns.uids(kind)).get(name, before[kind][name]) != before[kind][name] for kind, name in to_delete]
            )

        await ns.until(all_back)
        await ns.wait_until_ready()
        assert (await ns.status())["trainer"]["number"] == 1


async def test_edited_children_are_restored(ns: NamespaceClient):
    def image(body: Object) -> str:
        return body["spec"]["template"]["spec"]["containers"][0]["image"]

    async with ns.operator() as operator:
        await ns.create(job(ns.name))
        await ns.wait_until_ready()
        await operator.idle()
        other_image = {"spec": {"template": {"spec": {"containers": [{"name": "main", "image": "other_image"}]}}}}
        edits: list[tuple[str, str, Object, Callable[[Object], Any]]] = [
            ("Deployment", "sums-runner", other_image, image),
            ("Deployment", "sums-rollout-main", {"spec": {"replicas": 7}}, lambda body: body["spec"]["replicas"]),
            (
                "Service",
                "sums-coordinator",
                {"spec": {"selector": {"app": "x"}}},
                lambda body: body["spec"]["selector"],
            ),
            ("ConfigMap", "sums-job", {"data": {"job.json": "{}"}}, lambda body: body["data"]),
            ("Role", "sums-coordinator", {"rules": []}, lambda body: body["rules"]),
        ]
        for kind, name, edit, look in edits:
            before = await ns.get(kind, name)
            edited = await ns.patch(kind, name, edit, "strategic")
            assert look(edited) != look(before)

            async def as_before(kind: str = kind, name: str = name, look: Any = look, before: Any = before) -> bool:
                return look(await ns.get(kind, name)) == look(before)

            await ns.until(as_before)
            assert (await ns.get(kind, name))["metadata"]["uid"] == before["metadata"]["uid"]
        await operator.idle()


async def test_metadata_that_others_add_to_a_child_is_kept(ns: NamespaceClient):
    async with ns.operator() as operator:
        await ns.create(job(ns.name))
        await ns.wait_until_ready()
        await operator.idle()
        before = operator.writes
        extra = {"metadata": {"annotations": {"team": "red"}, "labels": {"cost-centre": "7"}}}
        await operator.sees(await ns.patch("Service", "sums-coordinator", extra))
        await operator.settled()
        assert (await ns.get("Service", "sums-coordinator"))["metadata"]["annotations"]["team"] == "red"
        assert operator.writes == before


FOREIGN: dict[str, Object] = {
    "ConfigMap": {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "sums-job"},
        "data": {"job.json": "mine"},
    },
    "Service": {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "sums-coordinator"},
        "spec": {"selector": {"app": "mine"}, "ports": [{"port": 1}]},
    },
    "Deployment": {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "sums-runner", "labels": {"rljob.dev/job": "sums"}},
        "spec": {
            "replicas": 0,
            "selector": {"matchLabels": {"app": "mine"}},
            "template": {
                "metadata": {"labels": {"app": "mine"}},
                "spec": {"containers": [{"name": "x", "image": "x"}]},
            },
        },
    },
}


@pytest.mark.parametrize("kind", sorted(FOREIGN))
async def test_a_foreign_object_of_the_same_name_is_reported_and_left_alone(ns: NamespaceClient, kind: str):
    body = FOREIGN[kind] | {"metadata": {**FOREIGN[kind]["metadata"], "namespace": ns.name}}
    name = body["metadata"]["name"]
    mine = await ns.create(body)
    async with ns.operator() as operator:
        await ns.create(job(ns.name))

        async def reported() -> bool:
            reason, message = await ns.ready_reason()
            return reason == "NameConflict" and f"{kind} {name}" in message

        await ns.until(reported)
        await operator.settled()
        there = await ns.get(kind, name)
        assert there["metadata"]["uid"] == mine["metadata"]["uid"]
        assert there["metadata"]["generation" if kind == "Deployment" else "resourceVersion"]
        assert not any(entry["manager"] == "rljob-operator" for entry in there["metadata"]["managedFields"])
        await ns.delete(kind, name)
        await ns.wait_until_ready()
        assert (await ns.get(kind, name))["metadata"]["ownerReferences"][0]["name"] == "sums"


async def test_a_foreign_object_of_a_later_role_is_reported_before_anything_is_started(ns: NamespaceClient):
    body = copy.deepcopy(FOREIGN["Deployment"])
    body["metadata"] = {"name": "sums-rollout-main", "namespace": ns.name}
    async with ns.operator() as operator:
        await ns.create(body)
        await ns.create(job(ns.name))

        async def reported() -> bool:
            return (await ns.ready_reason())[0] == "NameConflict"

        await ns.until(reported)
        assert "Deployment sums-rollout-main belongs to another owner" in (await ns.ready_reason())[1]
        await operator.idle()
        assert operator.writes.keys() & {"create jobs", "create deployments", "create statefulsets"} == set()
        await ns.delete("Deployment", "sums-rollout-main")

        async def started() -> bool:
            return bool(await ns.list("Job")) and (await ns.ready_reason())[0] != "NameConflict"

        await ns.until(started)


async def test_an_object_that_a_quota_rejects_is_reported_and_created_when_the_quota_allows_it(ns: NamespaceClient):
    await ns.create(
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "small", "namespace": ns.name},
            "spec": {"hard": {"count/deployments.apps": "1"}},
        }
    )
    quota = f"/api/v1/namespaces/{ns.name}/resourcequotas/small"
    api = ns.cluster.api
    await asyncio.to_thread(api.wait_for, lambda: "hard" in api.get(quota).get("status", {}), 120)
    async with ns.operator():
        await ns.create(job(ns.name))

        async def refused() -> bool:
            reason, message = await ns.ready_reason()
            return reason == "QuotaExceeded" and "small" in message

        await ns.until(refused)
        await asyncio.to_thread(api.patch, quota, {"spec": {"hard": {"count/deployments.apps": "9"}}})
        await ns.wait_until_ready()


@pytest.mark.parametrize("seed", range(3))
async def test_a_job_starts_although_a_third_of_all_requests_fails(ns: NamespaceClient, seed: int):
    async with ns.operator(client=unreliable(0.33, seed)) as operator:
        await ns.create(job(ns.name))
        await ns.wait_until_ready()
        assert operator.client.injected >= 5
        assert [name for name in await ns.uids("Job")] == ["sums-trainer-1"]
        assert (await ns.status())["trainer"]["number"] == 1


async def test_a_conflict_in_the_status_causes_another_decision(ns: NamespaceClient):
    async with ns.operator(client=InterferingClient) as operator:
        conflicts = 0

        async def interfere(verb: str, path: str, body: Any) -> None:
            nonlocal conflicts
            if path.endswith("/rljobs/sums/status") and "resourceVersion" in body["metadata"] and conflicts < 3:
                conflicts += 1
                await ns.patch("RLJob", "sums", {"metadata": {"labels": {"n": str(conflicts)}}})

        operator.client.interfere = interfere
        await ns.create(job(ns.name))
        await ns.wait_until_ready()
        assert conflicts == 3
        assert await ns.uids("Job") and (await ns.status())["trainer"]["number"] == 1


async def test_stale_caches_create_nothing_twice(ns: NamespaceClient):
    async with ns.operator(client=HoldingClient) as operator:
        client = operator.client
        client.held = frozenset(resource.plural for resource in CHILDREN)
        client.flow.clear()
        await ns.create(job(ns.name))
        await ns.until(lambda: ns.get("Job", "sums-trainer-1"))
        for i in range(5):  # each causes a reconcile with caches that lack the children
            await operator.sees(await ns.patch("RLJob", "sums", {"metadata": {"labels": {"n": str(i)}}}))
            await operator.reconciled()
        pools = [{"name": "main", "replicas": {"min": 3, "max": 4}}]
        await ns.patch("RLJob", "sums", {"spec": {"rollouts": pools}})

        async def scaled() -> bool:
            return (await ns.get("Deployment", "sums-rollout-main"))["spec"]["replicas"] == 3

        await ns.until(scaled)
        creations = {what: count for what, count in operator.writes.items() if what.startswith("create")}
        client.flow.set()
        await ns.wait_until_ready()
        await operator.idle()
        again = {what: count for what, count in operator.writes.items() if what.startswith("create")}
        assert {**again, "create events": 0} == {**creations, "create events": 0}
        assert (await ns.status())["trainer"]["number"] == 1


async def test_watches_that_break_or_are_too_old_lose_no_change(ns: NamespaceClient):
    async with ns.operator(client=BreakingClient) as operator:
        await ns.create(job(ns.name))
        await ns.wait_until_ready()
        operator.client.gone = 7
        operator.client.broken.set()

        async def all_cut() -> bool:
            return operator.client.cut >= {resource.plural for resource in CHILDREN}

        await ns.until(all_cut)
        await ns.delete("Service", "sums-coordinator")
        await ns.delete("Deployment", "sums-runner")
        operator.client.broken.clear()
        await ns.until(lambda: ns.get("Service", "sums-coordinator"))
        await ns.until(lambda: ns.get("Deployment", "sums-runner"))
        await ns.wait_until_ready()


async def test_a_silent_watch_is_restarted_and_loses_no_change(ns: NamespaceClient, monkeypatch):
    monkeypatch.setattr("rljob.kube.client.STALL_SECONDS", 1.0)
    async with ns.operator() as operator:
        restarts = operator.operator.metrics.watch_restarts.labels("services", "error")
        await ns.create(job(ns.name))
        await ns.wait_until_ready()
        silent = restarts._value.get()

        async def restarted() -> bool:
            return restarts._value.get() > silent

        await ns.until(restarted)
        await ns.delete("Service", "sums-coordinator")
        await ns.until(lambda: ns.get("Service", "sums-coordinator"))


async def test_lists_of_many_pages_are_read_completely(ns: NamespaceClient):
    async with ns.operator() as operator:
        for i in range(3):
            await ns.create(job(ns.name, f"sums-{i}"))
        for i in range(3):
            await ns.wait_until_ready(f"sums-{i}")
        await operator.idle()
        whole = {cache.resource.kind: len(cache) for cache in operator.operator.caches.children.values()}
    async with ns.operator(client=PagingClient) as operator:
        assert {cache.resource.kind: len(cache) for cache in operator.operator.caches.children.values()} == whole
        assert whole["Deployment"] == 12
        for i in range(3):
            await operator.settled(f"sums-{i}")
        assert operator.writes == {}


async def test_jobs_of_the_configured_namespaces_are_reconciled_and_no_others(
    cluster: ControlPlane, ns: NamespaceClient
):
    second, other = [NamespaceClient(cluster, await asyncio.to_thread(cluster.namespace)) for _ in range(2)]
    async with running_operator(cluster.kubeconfig, [ns.name, second.name]):
        for each in (other, ns, second):
            await each.create(job(each.name))
        await ns.wait_until_ready()
        await second.wait_until_ready()
        await second.delete("Service", "sums-coordinator")
        await second.until(lambda: second.get("Service", "sums-coordinator"))
        assert await other.status() == {}


async def test_an_object_that_the_api_server_rejects_is_reported_and_created_after_the_spec_is_corrected(
    ns: NamespaceClient,
):
    mount = {"name": "main", "volumeMounts": [{"name": "nowhere", "mountPath": "/nowhere"}]}
    async with ns.operator() as operator:
        await ns.create(job(ns.name, runner={"template": {"spec": {"containers": [mount]}}}))

        async def reported() -> bool:
            reason, message = await ns.ready_reason()
            return reason == "APIRejected" and "nowhere" in message

        await ns.until(reported)
        await ns.patch("RLJob", "sums", {"spec": {"runner": {"template": None}}})
        await ns.wait_until_ready()
        await operator.idle()
