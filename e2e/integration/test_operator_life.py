"""The lifecycle of a job in a real control plane: kwok simulates the pods, the test acts as the coordinator."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from math import ceil
from typing import Any

import pytest

from e2e.integration.job_lifecycle import GPUS, JobClient
from e2e.integration.operators import Object, running_operator
from tools.cluster.controlplane import ControlPlane

pytestmark = pytest.mark.timeout(300)

POOL = "rollout-main"


@pytest.fixture
def job_client(cluster: ControlPlane, namespace: str) -> JobClient:
    return JobClient(cluster, namespace)


def operator(job_client: JobClient, **options: Any) -> Any:
    return running_operator(job_client.cluster.kubeconfig, [job_client.namespace], **options)


def annotated(**annotations: str) -> dict[str, Any]:
    """Return a pod template whose annotations control the simulated pods (tools/cluster/pods.py)."""
    return {"metadata": {"annotations": {f"kwok.rljob.dev/{key}": value for key, value in annotations.items()}}}


async def test_one_apply_brings_up_the_whole_gang(job_client: JobClient):
    async with operator(job_client):
        await job_client.apply(trainer={"nodes": 2})
        await job_client.ready_pods()
        assert await job_client.reason("Starting")
        pods = [pod["metadata"]["labels"]["rljob.dev/role"] for pod in await job_client.pods()]
        assert sorted(pods) == ["coordinator", "reward-sums", POOL, POOL, "runner", "trainer", "trainer"]
        await job_client.apply_run("Running")
        await job_client.reason("Running")
        status = await job_client.status()
        assert status["ready"] == {
            "trainer": "2/2",
            "rollout": "2/2",
            "reward": "1/1",
            "environment": "",
            "restarts": "",
        }
        assert status["observedGeneration"] == 1
        assert status["startTime"]
        assert [event for event in await job_client.events() if event in ("Starting", "Running")] == [
            "Starting",
            "Running",
        ]


async def test_an_initializer_runs_before_any_other_pod_is_created(job_client: JobClient):
    async with operator(job_client):
        await job_client.apply(initializer={"command": ["make-model", "job://model"]})
        await job_client.ready_pods()
        job = (await job_client.children("Job"))["sums-initializer"]
        others = [
            pod for pod in await job_client.pods() if pod["metadata"]["labels"]["rljob.dev/role"] != "initializer"
        ]
        assert len(others) == 6
        done = job["status"]["completionTime"]
        assert all(pod["metadata"]["creationTimestamp"] >= done for pod in others)
        assert (await job_client.condition("Initialized"))[:2] == ("True", "Initialized")
        assert "Initialized" in await job_client.events()


def image(name: str) -> dict[str, Any]:
    """Return a role with another image of its main container."""
    return {"template": {"spec": {"containers": [{"name": "main", "image": name}]}}}


async def test_a_corrected_image_and_pod_template_of_the_initializer_are_used(job_client: JobClient):
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "none", "namespace": job_client.namespace},
    }
    await asyncio.to_thread(job_client.cluster.api.create, quota | {"spec": {"hard": {"pods": "0"}}})
    async with operator(job_client):
        await job_client.apply(initializer={"command": ["make-model"]}, trainer=image("registry/typo:1"))
        await job_client.until(lambda: _initializer_has(job_client, "registry/typo:1"))
        await job_client.change(trainer=image("registry/right:1"))
        await job_client.until(lambda: _initializer_has(job_client, "registry/right:1"))
        enough = {"limits": {"memory": "64Gi"}}
        pod = {"containers": [{"name": "main", "resources": enough}], "nodeSelector": {"disk": "large"}}
        await job_client.change(initializer={"template": {"spec": pod}})
        await job_client.until(lambda: _initializer_has(job_client, "registry/right:1", enough))
        assert (await job_client.children("Job"))["sums-initializer"]["spec"]["template"]["spec"]["nodeSelector"]


async def _initializer_has(job_client: JobClient, image: str, resources: Object | None = None) -> bool:
    job = (await job_client.children("Job")).get("sums-initializer")
    main = job["spec"]["template"]["spec"]["containers"][0] if job is not None else {}
    limits = main.get("resources", {}).get("limits")
    return bool(main) and main["image"] == image and limits == (resources or {}).get("limits")


async def test_a_failed_trainer_pod_restarts_the_group_as_the_next_attempt(job_client: JobClient):
    async with operator(job_client):
        await job_client.run_up(trainer={"nodes": 2})
        job_client.cluster.pods.exit(
            job_client.namespace, await job_client.any_pod("trainer"), 1, "loading\nCUDA out of memory"
        )
        attempt = await job_client.attempt(2)
        assert attempt["charged"] == 1
        assert "exit code 1: CUDA out of memory" in attempt["cause"]
        assert list(await job_client.children("Job")) == ["sums-trainer-2"]
        assert {pod["metadata"]["labels"]["rljob.dev/attempt"] for pod in await job_client.pods("trainer")} == {"2"}
        role = await job_client.role("trainer")
        assert (role["restarts"], role["lastExit"]) == (1, "exit code 1")
        await job_client.reason("Running")
        assert "TrainerRestarted" in await job_client.events()


async def test_a_trainer_pod_on_a_lost_node_is_not_waited_for(job_client: JobClient):
    ahead = 0.0
    async with operator(job_client, wall=lambda: time.time() + ahead):
        await job_client.run_up(trainer={"template": annotated(behaviour="lingering")})
        job_client.cluster.pods.evict(job_client.namespace, await job_client.any_pod("trainer"))
        await job_client.until(lambda: _no_trainer(job_client))
        assert (await job_client.status())["trainer"]["number"] == 1
        ahead = 120.0  # longer than the grace period of the pod and half a minute
        await job_client.change(ttlSecondsAfterFinished=1)  # causes a reconcile
        attempt = await job_client.attempt(2)
        assert "is lost" in attempt["cause"]
        assert attempt["charged"] == 0


async def _no_trainer(job_client: JobClient) -> bool:
    return (await job_client.role("trainer")).get("ready") == 0


async def test_a_trainer_whose_job_loses_its_label_does_not_run_beside_the_next(job_client: JobClient):
    async with operator(job_client):
        await job_client.run_up()
        await job_client.kubectl("label", "job", "sums-trainer-1", "rljob.dev/job-")
        await job_client.attempt(2)

        async def alone() -> bool:
            names = (await job_client.kubectl("get", "jobs", "-o", "name")).split()
            return names == ["job.batch/sums-trainer-2"] and len(await job_client.pods("trainer")) == 1

        await job_client.until(alone)


async def test_a_scale_that_loses_its_label_costs_no_engine(job_client: JobClient):
    async with operator(job_client) as running:
        await job_client.run_up()
        await job_client.kubectl("scale", "rljs", f"sums-{POOL}", "--replicas=4")
        await job_client.until(lambda: _ready(job_client, 4))
        before = {pod["metadata"]["uid"] for pod in await job_client.pods(POOL)}
        await job_client.kubectl("label", "rljs", f"sums-{POOL}", "rljob.dev/job-")

        async def restored() -> bool:
            return f"sums-{POOL}" in await job_client.children("RLJobScale")

        await job_client.until(restored)
        await running.idle()
        assert (await job_client.role(POOL))["desired"] == 4
        assert {pod["metadata"]["uid"] for pod in await job_client.pods(POOL)} == before


async def test_exit_code_2_ends_the_run(job_client: JobClient):
    async with operator(job_client):
        await job_client.run_up()
        job_client.cluster.pods.exit(
            job_client.namespace, await job_client.any_pod("trainer"), 2, "the batch does not fit"
        )
        message = await job_client.reason("ConfigurationError", "Failed")
        assert "the trainer rejects its configuration: exit code 2: the batch does not fit" in message
        assert (await job_client.condition("Ready"))[1] == "Failed"
        await job_client.no_pods("coordinator", "trainer")
        assert await job_client.pods("coordinator")
        assert [pod["status"]["phase"] for pod in await job_client.pods("trainer")] == ["Failed"], (
            "its log cannot be read"
        )
        assert (await job_client.status())["completionTime"]


async def test_suspending_frees_every_pod_and_resuming_continues(job_client: JobClient):
    async with operator(job_client):
        await job_client.run_up()
        claim = (await job_client.children("PersistentVolumeClaim"))["sums-storage"]["metadata"]["uid"]
        await job_client.kubectl("patch", "rlj", "sums", "--type=merge", "-p", '{"spec":{"suspend":true}}')
        await job_client.reason("Suspending")
        assert len(await job_client.pods()) == 6  # until the coordinator reports Suspended
        await job_client.apply_run("Suspended")
        await job_client.reason("Suspended", "Suspended")
        assert await job_client.pods() == []
        assert (await job_client.children("PersistentVolumeClaim"))["sums-storage"]["metadata"]["uid"] == claim
        assert await job_client.children("ConfigMap")
        await job_client.change(suspend=False)
        attempt = await job_client.attempt(2)
        assert attempt["charged"] == 0
        await job_client.ready_pods()
        await job_client.apply_run("Running")
        await job_client.reason("Running")
        assert (await job_client.condition("Suspended"))[:2] == ("False", "Resumed")
        assert (await job_client.children("PersistentVolumeClaim"))["sums-storage"]["metadata"]["uid"] == claim


async def test_a_burst_of_suspend_and_resume_ends_in_the_last_requested_state(job_client: JobClient):
    async with operator(job_client):
        await job_client.run_up(suspendGraceSeconds=1)
        for suspend in (True, False, True, False, True, False):
            await job_client.change(suspend=suspend)
        await job_client.until(lambda: _resumed(job_client))
        await job_client.ready_pods()
        assert len(await job_client.children("Job")) == 1


async def _resumed(job_client: JobClient) -> bool:
    body = await job_client.body()
    status = body["status"]
    return status["observedGeneration"] == body["metadata"]["generation"] and "suspendedAt" not in status


async def test_success_frees_accelerators_at_once_and_the_rest_later(job_client: JobClient):
    async with operator(job_client):
        await job_client.run_up(keepCoordinatorSeconds=1000)
        await job_client.apply_run("Succeeded", message="5 of 5 steps")
        assert await job_client.reason("Succeeded", "Complete") == "5 of 5 steps"
        await job_client.no_pods("coordinator")
        assert await job_client.pods("coordinator")
        await job_client.change(keepCoordinatorSeconds=await _two_seconds_from_now(job_client))
        await job_client.no_pods()
        await job_client.change(ttlSecondsAfterFinished=await _two_seconds_from_now(job_client))
        path = job_client._path("RLJob", "sums")
        await asyncio.to_thread(job_client.cluster.api.wait_gone, path)
        assert await job_client.children("PersistentVolumeClaim")  # retained
        await job_client.until(lambda: _nothing_but_the_claim(job_client))


async def _two_seconds_from_now(job_client: JobClient, since: str = "completionTime") -> int:
    """Return the seconds from a time in the status to two seconds from now.

    A deadline of this length is never in the past and is reached soon, also on a busy machine.
    """
    began = datetime.fromisoformat((await job_client.status())[since])
    return ceil((datetime.now(UTC) - began).total_seconds()) + 2


async def _nothing_but_the_claim(job_client: JobClient) -> bool:
    kinds = ("StatefulSet", "Deployment", "Job", "ConfigMap", "ServiceAccount", "Role", "RoleBinding", "Service")
    kinds += ("PodDisruptionBudget", "NetworkPolicy", "RLJobScale", "Pod")
    return not any([await job_client.children(kind) for kind in kinds])


async def test_pods_without_an_accelerator_are_reported_and_fail_the_run_after_pending_seconds(job_client: JobClient):
    async with operator(job_client, cluster=GPUS):
        await job_client.apply(
            trainer={"processesPerNode": 64},
            failurePolicy={"pendingSeconds": 3},
        )
        message = await job_client.reason("PodsPending")
        assert message == "1 of 1 trainer pod pending: insufficient nvidia.com/gpu"
        assert (await job_client.status())["pendingSince"]
        await job_client.reason("PendingTimeout", "Failed")
        await job_client.no_pods("coordinator")


async def test_the_missing_storage_class_of_a_users_claim_is_named(job_client: JobClient):
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}, "storageClassName": "nope"}
    meta = {"name": "mine", "namespace": job_client.namespace}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": spec}
    await asyncio.to_thread(job_client.cluster.api.create, claim)
    async with operator(job_client):
        await job_client.apply(storage={"claim": "mine"})

        async def named() -> bool:
            return (
                "claim mine (spec.storage.claim) requests StorageClass nope" in (await job_client.condition("Ready"))[2]
            )

        await job_client.until(named)


async def test_a_quota_that_is_exceeded_is_named(job_client: JobClient):
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "3"}}}
    job_client.cluster.api.post(f"/api/v1/namespaces/{job_client.namespace}/resourcequotas", quota)
    async with operator(job_client):
        await job_client.apply()
        assert "exceeded quota: few" in await job_client.reason("QuotaExceeded")


async def test_the_exit_of_a_crashing_component_is_reported(job_client: JobClient):
    async with operator(job_client):
        await job_client.apply(
            runner={"template": annotated(**{"exit-code": "1", "message": "ImportError: no module x"})}
        )
        message = await job_client.reason("CrashLoop")
        assert message.startswith("1 of 1 runner pod crashing: exit code 1: ImportError: no module x")


async def test_kubectl_scales_a_pool_up_and_engines_are_drained_on_the_way_down(job_client: JobClient):
    async with operator(job_client):
        await job_client.run_up()
        await job_client.kubectl("scale", "rljs", f"sums-{POOL}", "--replicas=4")
        await job_client.until(lambda: _ready(job_client, 4))
        engines = [{"name": pod["metadata"]["name"], "load": 5} for pod in await job_client.pods(POOL)]
        await job_client.apply_run("Running", engines=engines)
        await job_client.kubectl("scale", "rljs", f"sums-{POOL}", "--replicas=3")
        leaving = (await job_client.until(lambda: _draining(job_client)))[0]
        assert len(await job_client.pods(POOL)) == 4  # the engine still has requests
        drained = [{**engine, "drained": engine["name"] == leaving} for engine in engines]
        await job_client.apply_run("Running", engines=drained)
        await job_client.until(lambda: _ready(job_client, 3))
        assert leaving not in {pod["metadata"]["name"] for pod in await job_client.pods(POOL)}

        async def settled() -> bool:
            return not (await job_client.status()).get("draining")

        await job_client.until(settled)
        scale = (await job_client.children("RLJobScale"))[f"sums-{POOL}"]
        assert scale["status"]["replicas"] == 3
        assert scale["spec"]["replicas"] == 3
        assert (await job_client.events()).count("Running") == 1  # the job stayed ready


async def _ready(job_client: JobClient, count: int) -> bool:
    role = await job_client.role(POOL)
    return bool(role.get("ready") == role.get("desired") == count == len(await job_client.pods(POOL)))


async def _draining(job_client: JobClient) -> list[str]:
    found: list[str] = (await job_client.status()).get("draining", [])
    return found


async def test_a_job_that_another_controller_manages_is_left_alone(job_client: JobClient):
    async with operator(job_client) as running:
        await job_client.apply(managedBy="example.com/other")
        await running.idle()
        assert await job_client.status() == {}
        assert await _nothing_but_the_claim(job_client)
        assert await job_client.children("PersistentVolumeClaim") == {}


async def test_a_retained_claim_is_taken_over_by_the_same_job_and_by_no_other(job_client: JobClient):
    async with operator(job_client):
        await job_client.run_up()
        claim = (await job_client.children("PersistentVolumeClaim"))["sums-storage"]["metadata"]["uid"]
        await job_client.delete()
        await job_client.until(lambda: _nothing_but_the_claim(job_client))
        await job_client.apply(seed=7)
        message = await job_client.reason("NameConflict")
        assert "sums-storage" in message
        assert "another name" in message
        assert await job_client.pods() == []
        await job_client.delete()
        await job_client.until(lambda: _nothing_but_the_claim(job_client))
        await job_client.run_up()
        assert (await job_client.children("PersistentVolumeClaim"))["sums-storage"]["metadata"]["uid"] == claim


async def test_a_job_waits_while_another_uses_its_claim(job_client: JobClient):
    second = JobClient(job_client.cluster, job_client.namespace, "second")
    async with operator(job_client):
        await job_client.run_up(keepCoordinatorSeconds=600)
        await second.apply(storage={"claim": "sums-storage"}, initializer={"command": ["make-model"]})
        assert "claim sums-storage is in use by RLJob sums;" in await second.reason("ClaimInUse")
        await job_client.apply_run("Succeeded")
        await job_client.no_pods("coordinator")

        async def reports_that_the_other_has_ended() -> bool:
            return "has ended and whose coordinator is kept for 600 s" in (await second.condition("Ready"))[2]

        await second.until(reports_that_the_other_has_ended)
        assert (await second.condition("Initialized"))[:2] == ("False", "ClaimInUse")
        assert not await second.children("Job") and not await second.children("StatefulSet")
        await job_client.delete()
        await second.ready_pods()
        assert (await second.condition("Initialized"))[1] == "Initialized"


async def test_a_claim_that_is_not_retained_is_deleted_with_the_job(job_client: JobClient):
    async with operator(job_client):
        await job_client.run_up(storage={"retention": "Delete"})
        await job_client.delete()
        await job_client.until(lambda: _nothing_but_the_claim(job_client))

        async def gone() -> bool:
            return not await job_client.children("PersistentVolumeClaim")

        await job_client.until(gone)


async def test_a_name_of_63_characters_works(cluster: ControlPlane, namespace: str):
    job_client = JobClient(cluster, namespace, "a" * 62 + "z")
    async with operator(job_client):
        await job_client.run_up(rollouts=[{"name": "p" * 63, "replicas": {"min": 1, "max": 2}}])
        names = [
            name for kind in ("Job", "Deployment", "StatefulSet", "Service") for name in await job_client.children(kind)
        ]
        assert names
        assert max(map(len, names)) <= 52
        job_client.cluster.pods.exit(namespace, await job_client.any_pod("trainer"), 1)
        await job_client.attempt(2)


async def test_kubectl_shows_why_a_job_does_not_run(job_client: JobClient):
    async with operator(job_client, cluster=GPUS):
        await job_client.apply(trainer={"processesPerNode": 64})

        async def row_of_job() -> list[str]:
            return (await job_client.kubectl("get", "rlj")).splitlines()[1].split()[:5]

        async def reported() -> bool:
            return await row_of_job() == ["sums", "PodsPending", "0/1", "0/2", "1/1"]  # engines wait for the trainer

        await job_client.until(reported)
        message = await job_client.reason("PodsPending")
        head = (await job_client.kubectl("get", "rlj")).splitlines()[0]
        assert " ".join(head.split()) == "NAME READY STEP PROGRESS TRAINER ROLLOUT REWARD STALENESS AGE"
        assert message in await job_client.kubectl("get", "rlj", "-o", "wide")
        output = await job_client.kubectl("describe", "rlj", "sums")
        assert message in output
        assert "PodsPending" in output.partition("Events:")[2]
