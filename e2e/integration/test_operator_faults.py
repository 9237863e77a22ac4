"""The operator when things go wrong around it: on a real API server, with kwok's nodes."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import pytest

from e2e.integration.api_cases import Scene
from e2e.integration.faulty import BreakingClient, HoldingClient, MeddlingClient, PagingClient, unreliable
from e2e.integration.operators import Object, job, running_operator
from rljob.operator.resources import CHILDREN
from tools.cluster.controlplane import ControlPlane

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def scene(cluster: ControlPlane, namespace: str) -> Scene:
    return Scene(cluster, namespace)


async def test_children_that_are_deleted_come_back(scene: Scene):
    async with scene.operator() as operator:
        await scene.create(job(scene.namespace))
        await scene.up()
        await operator.idle()
        before = {resource.kind: await scene.uids(resource.kind) for resource in CHILDREN}
        lasting = {"Job", "PersistentVolumeClaim"}  # a trainer's Job comes back as the next attempt; pods hold a claim
        doomed = [
            (kind, name)
            for kind, uids in before.items()
            for name in uids
            if name.startswith("sums-") and kind not in lasting
        ]
        assert len({kind for kind, _ in doomed}) == len(CHILDREN) - len(lasting)
        for kind, name in doomed:
            await scene.delete(kind, name)

        async def all_back() -> bool:
            return all(
                [(await scene.uids(kind)).get(name, before[kind][name]) != before[kind][name] for kind, name in doomed]
            )

        await scene.until(all_back)
        await scene.up()
        assert (await scene.status())["trainer"]["number"] == 1


async def test_children_that_are_edited_are_put_right(scene: Scene):
    def image(body: Object) -> str:
        return body["spec"]["template"]["spec"]["containers"][0]["image"]

    async with scene.operator() as operator:
        await scene.create(job(scene.namespace))
        await scene.up()
        await operator.idle()
        evil = {"spec": {"template": {"spec": {"containers": [{"name": "main", "image": "evil"}]}}}}
        edits: list[tuple[str, str, Object, Callable[[Object], Any]]] = [
            ("Deployment", "sums-runner", evil, image),
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
            before = await scene.get(kind, name)
            edited = await scene.patch(kind, name, edit, "strategic")
            assert look(edited) != look(before)

            async def as_before(kind: str = kind, name: str = name, look: Any = look, before: Any = before) -> bool:
                return look(await scene.get(kind, name)) == look(before)

            await scene.until(as_before)
            assert (await scene.get(kind, name))["metadata"]["uid"] == before["metadata"]["uid"]
        await operator.idle()


async def test_what_others_add_to_a_child_is_left_alone(scene: Scene):
    async with scene.operator() as operator:
        await scene.create(job(scene.namespace))
        await scene.up()
        await operator.idle()
        before = operator.writes
        extra = {"metadata": {"annotations": {"team": "red"}, "labels": {"cost-centre": "7"}}}
        await operator.sees(await scene.patch("Service", "sums-coordinator", extra))
        await operator.settled()
        assert (await scene.get("Service", "sums-coordinator"))["metadata"]["annotations"]["team"] == "red"
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
async def test_a_foreign_object_of_the_same_name_is_reported_and_left_alone(scene: Scene, kind: str):
    body = FOREIGN[kind] | {"metadata": {**FOREIGN[kind]["metadata"], "namespace": scene.namespace}}
    name = body["metadata"]["name"]
    mine = await scene.create(body)
    async with scene.operator() as operator:
        await scene.create(job(scene.namespace))

        async def reported() -> bool:
            reason, message = await scene.ready_reason()
            return reason == "NameConflict" and f"{kind} {name}" in message

        await scene.until(reported)
        await operator.settled()
        there = await scene.get(kind, name)
        assert there["metadata"]["uid"] == mine["metadata"]["uid"]
        assert there["metadata"]["generation" if kind == "Deployment" else "resourceVersion"]
        assert not any(entry["manager"] == "rljob-operator" for entry in there["metadata"]["managedFields"])
        await scene.delete(kind, name)
        await scene.up()
        assert (await scene.get(kind, name))["metadata"]["ownerReferences"][0]["name"] == "sums"


async def test_a_foreign_object_of_a_later_role_is_reported_before_anything_is_started(scene: Scene):
    body = copy.deepcopy(FOREIGN["Deployment"])
    body["metadata"] = {"name": "sums-rollout-main", "namespace": scene.namespace}
    async with scene.operator() as operator:
        await scene.create(body)
        await scene.create(job(scene.namespace))

        async def reported() -> bool:
            return (await scene.ready_reason())[0] == "NameConflict"

        await scene.until(reported)
        assert "Deployment sums-rollout-main belongs to another owner" in (await scene.ready_reason())[1]
        await operator.idle()
        assert operator.writes.keys() & {"create jobs", "create deployments", "create statefulsets"} == set()
        await scene.delete("Deployment", "sums-rollout-main")

        async def started() -> bool:
            return bool(await scene.list("Job")) and (await scene.ready_reason())[0] != "NameConflict"

        await scene.until(started)


async def test_what_a_quota_refuses_is_reported_and_made_once_there_is_room(scene: Scene):
    await scene.create(
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "small", "namespace": scene.namespace},
            "spec": {"hard": {"count/deployments.apps": "1"}},
        }
    )
    quota = f"/api/v1/namespaces/{scene.namespace}/resourcequotas/small"
    api = scene.cluster.api
    await asyncio.to_thread(api.wait_for, lambda: "hard" in api.get(quota).get("status", {}), 120)
    async with scene.operator():
        await scene.create(job(scene.namespace))

        async def refused() -> bool:
            reason, message = await scene.ready_reason()
            return reason == "QuotaExceeded" and "small" in message

        await scene.until(refused)
        await asyncio.to_thread(api.patch, quota, {"spec": {"hard": {"count/deployments.apps": "9"}}})
        await scene.up()


@pytest.mark.parametrize("seed", range(3))
async def test_a_job_comes_up_though_a_third_of_all_requests_fails(scene: Scene, seed: int):
    async with scene.operator(client=unreliable(0.33, seed)) as operator:
        await scene.create(job(scene.namespace))
        await scene.up()
        assert operator.client.injected >= 5
        assert [name for name in await scene.uids("Job")] == ["sums-trainer-1"]
        assert (await scene.status())["trainer"]["number"] == 1


async def test_a_status_that_changed_meanwhile_is_decided_on_again(scene: Scene):
    async with scene.operator(client=MeddlingClient) as operator:
        conflicts = 0

        async def meddle(verb: str, path: str, body: Any) -> None:
            nonlocal conflicts
            if path.endswith("/rljobs/sums/status") and "resourceVersion" in body["metadata"] and conflicts < 3:
                conflicts += 1
                await scene.patch("RLJob", "sums", {"metadata": {"labels": {"n": str(conflicts)}}})

        operator.client.meddle = meddle
        await scene.create(job(scene.namespace))
        await scene.up()
        assert conflicts == 3
        assert await scene.uids("Job") and (await scene.status())["trainer"]["number"] == 1


async def test_caches_that_lag_behind_make_nothing_twice(scene: Scene):
    async with scene.operator(client=HoldingClient) as operator:
        client = operator.client
        client.held = frozenset(resource.plural for resource in CHILDREN)
        client.flow.clear()
        await scene.create(job(scene.namespace))
        await scene.until(lambda: scene.get("Job", "sums-trainer-1"))
        for i in range(5):  # each has it decide again, on caches that know only of its own writes
            await operator.sees(await scene.patch("RLJob", "sums", {"metadata": {"labels": {"n": str(i)}}}))
            await operator.reconciled()
        pools = [{"name": "main", "replicas": {"min": 3, "max": 4}}]
        await scene.patch("RLJob", "sums", {"spec": {"rollouts": pools}})

        async def scaled() -> bool:
            return (await scene.get("Deployment", "sums-rollout-main"))["spec"]["replicas"] == 3

        await scene.until(scaled)
        creations = {what: count for what, count in operator.writes.items() if what.startswith("create")}
        client.flow.set()
        await scene.up()
        await operator.idle()
        again = {what: count for what, count in operator.writes.items() if what.startswith("create")}
        assert {**again, "create events": 0} == {**creations, "create events": 0}
        assert (await scene.status())["trainer"]["number"] == 1


async def test_watches_that_break_or_are_too_old_lose_no_change(scene: Scene):
    async with scene.operator(client=BreakingClient) as operator:
        await scene.create(job(scene.namespace))
        await scene.up()
        operator.client.gone = 7
        operator.client.broken.set()

        async def all_cut() -> bool:
            return operator.client.cut >= {resource.plural for resource in CHILDREN}

        await scene.until(all_cut)
        await scene.delete("Service", "sums-coordinator")
        await scene.delete("Deployment", "sums-runner")
        operator.client.broken.clear()
        await scene.until(lambda: scene.get("Service", "sums-coordinator"))
        await scene.until(lambda: scene.get("Deployment", "sums-runner"))
        await scene.up()


async def test_a_watch_that_falls_silent_is_begun_again_and_loses_no_change(scene: Scene, monkeypatch):
    monkeypatch.setattr("rljob.kube.client.STALL_SECONDS", 1.0)
    async with scene.operator() as operator:
        restarts = operator.operator.metrics.watch_restarts.labels("services", "error")
        await scene.create(job(scene.namespace))
        await scene.up()
        silent = restarts._value.get()

        async def begun_again() -> bool:
            return restarts._value.get() > silent

        await scene.until(begun_again)
        await scene.delete("Service", "sums-coordinator")
        await scene.until(lambda: scene.get("Service", "sums-coordinator"))


async def test_lists_of_many_pages_are_read_whole(scene: Scene):
    async with scene.operator() as operator:
        for i in range(3):
            await scene.create(job(scene.namespace, f"sums-{i}"))
        for i in range(3):
            await scene.up(f"sums-{i}")
        await operator.idle()
        whole = {cache.resource.kind: len(cache) for cache in operator.operator.caches.children.values()}
    async with scene.operator(client=PagingClient) as operator:
        assert {cache.resource.kind: len(cache) for cache in operator.operator.caches.children.values()} == whole
        assert whole["Deployment"] == 12
        for i in range(3):
            await operator.settled(f"sums-{i}")
        assert operator.writes == {}


async def test_jobs_of_every_namespace_that_is_named_are_looked_after_and_no_others(
    cluster: ControlPlane, scene: Scene
):
    second, other = [Scene(cluster, await asyncio.to_thread(cluster.namespace)) for _ in range(2)]
    async with running_operator(cluster.kubeconfig, [scene.namespace, second.namespace]):
        for each in (other, scene, second):
            await each.create(job(each.namespace))
        await scene.up()
        await second.up()
        await second.delete("Service", "sums-coordinator")
        await second.until(lambda: second.get("Service", "sums-coordinator"))
        assert await other.status() == {}


async def test_what_the_api_server_finds_invalid_is_reported_and_made_once_the_spec_is_mended(scene: Scene):
    mount = {"name": "main", "volumeMounts": [{"name": "nowhere", "mountPath": "/nowhere"}]}
    async with scene.operator() as operator:
        await scene.create(job(scene.namespace, runner={"template": {"spec": {"containers": [mount]}}}))

        async def reported() -> bool:
            reason, message = await scene.ready_reason()
            return reason == "APIRejected" and "nowhere" in message

        await scene.until(reported)
        await scene.patch("RLJob", "sums", {"spec": {"runner": {"template": None}}})
        await scene.up()
        await operator.idle()
