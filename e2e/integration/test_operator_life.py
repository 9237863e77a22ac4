"""The life of a job in a real cluster's control plane, whose pods kwok plays and whose coordinator is this test."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from math import ceil
from typing import Any

import pytest

from e2e.integration.job_lifecycle import GPUS, Life
from e2e.integration.operators import Object, running_operator
from tools.cluster.controlplane import ControlPlane

pytestmark = pytest.mark.timeout(300)

POOL = "rollout-main"


@pytest.fixture
def life(cluster: ControlPlane, namespace: str) -> Life:
    return Life(cluster, namespace)


def operator(life: Life, **options: Any) -> Any:
    return running_operator(life.cluster.kubeconfig, [life.namespace], **options)


def annotated(**annotations: str) -> dict[str, Any]:
    """Return a pod template that tells kwok what becomes of its pods."""
    return {"metadata": {"annotations": {f"kwok.rljob.dev/{key}": value for key, value in annotations.items()}}}


async def test_one_apply_brings_up_the_whole_gang(life: Life):
    async with operator(life):
        await life.apply(trainer={"nodes": 2})
        await life.ready_pods()
        assert await life.reason("Starting")
        pods = [pod["metadata"]["labels"]["rljob.dev/role"] for pod in await life.pods()]
        assert sorted(pods) == ["coordinator", "reward-sums", POOL, POOL, "runner", "trainer", "trainer"]
        await life.tell("Running")
        await life.reason("Running")
        status = await life.status()
        assert status["ready"] == {"trainer": "2/2", "rollout": "2/2", "reward": "1/1", "restarts": ""}
        assert status["observedGeneration"] == 1
        assert status["startTime"]
        assert [event for event in await life.events() if event in ("Starting", "Running")] == ["Starting", "Running"]


async def test_an_initializer_runs_before_any_other_pod_is_made(life: Life):
    async with operator(life):
        await life.apply(initializer={"command": ["make-model", "job://model"]})
        await life.ready_pods()
        job = (await life.children("Job"))["sums-initializer"]
        others = [pod for pod in await life.pods() if pod["metadata"]["labels"]["rljob.dev/role"] != "initializer"]
        assert len(others) == 6
        done = job["status"]["completionTime"]
        assert all(pod["metadata"]["creationTimestamp"] >= done for pod in others)
        assert (await life.condition("Initialized"))[:2] == ("True", "Initialized")
        assert "Initialized" in await life.events()


def image(name: str) -> dict[str, Any]:
    """Return a role with another image of its main container."""
    return {"template": {"spec": {"containers": [{"name": "main", "image": name}]}}}


async def test_a_corrected_image_of_the_initializer_is_used_and_what_it_is_given_to_work_with(life: Life):
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none", "namespace": life.namespace}}
    await asyncio.to_thread(life.cluster.api.create, quota | {"spec": {"hard": {"pods": "0"}}})
    async with operator(life):
        await life.apply(initializer={"command": ["make-model"]}, trainer=image("registry/typo:1"))
        await life.until(lambda: _initializer_has(life, "registry/typo:1"))
        await life.change(trainer=image("registry/right:1"))
        await life.until(lambda: _initializer_has(life, "registry/right:1"))
        enough = {"limits": {"memory": "64Gi"}}
        pod = {"containers": [{"name": "main", "resources": enough}], "nodeSelector": {"disk": "large"}}
        await life.change(initializer={"template": {"spec": pod}})
        await life.until(lambda: _initializer_has(life, "registry/right:1", enough))
        assert (await life.children("Job"))["sums-initializer"]["spec"]["template"]["spec"]["nodeSelector"]


async def _initializer_has(life: Life, image: str, resources: Object | None = None) -> bool:
    job = (await life.children("Job")).get("sums-initializer")
    main = job["spec"]["template"]["spec"]["containers"][0] if job is not None else {}
    limits = main.get("resources", {}).get("limits")
    return bool(main) and main["image"] == image and limits == (resources or {}).get("limits")


async def test_a_failed_trainer_pod_restarts_the_group_as_the_next_attempt(life: Life):
    async with operator(life):
        await life.run_up(trainer={"nodes": 2})
        life.cluster.pods.exit(life.namespace, await life.any_pod("trainer"), 1, "loading\nCUDA out of memory")
        attempt = await life.attempt(2)
        assert attempt["charged"] == 1
        assert "exit code 1: CUDA out of memory" in attempt["cause"]
        assert list(await life.children("Job")) == ["sums-trainer-2"]
        assert {pod["metadata"]["labels"]["rljob.dev/attempt"] for pod in await life.pods("trainer")} == {"2"}
        role = await life.role("trainer")
        assert (role["restarts"], role["lastExit"]) == (1, "exit code 1")
        await life.reason("Running")
        assert "TrainerRestarted" in await life.events()


async def test_a_trainer_pod_on_a_lost_node_is_not_waited_for(life: Life):
    ahead = 0.0
    async with operator(life, wall=lambda: time.time() + ahead):
        await life.run_up(trainer={"template": annotated(behaviour="lingering")})
        life.cluster.pods.evict(life.namespace, await life.any_pod("trainer"))
        await life.until(lambda: _no_trainer(life))
        assert (await life.status())["trainer"]["number"] == 1
        ahead = 120.0  # its own time to end, and half a minute
        await life.change(ttlSecondsAfterFinished=1)  # so that it is looked at
        attempt = await life.attempt(2)
        assert "is lost" in attempt["cause"]
        assert attempt["charged"] == 0


async def _no_trainer(life: Life) -> bool:
    return (await life.role("trainer")).get("ready") == 0


async def test_a_trainer_whose_job_loses_its_label_does_not_run_beside_the_next(life: Life):
    async with operator(life):
        await life.run_up()
        await life.kubectl("label", "job", "sums-trainer-1", "rljob.dev/job-")
        await life.attempt(2)

        async def alone() -> bool:
            names = (await life.kubectl("get", "jobs", "-o", "name")).split()
            return names == ["job.batch/sums-trainer-2"] and len(await life.pods("trainer")) == 1

        await life.until(alone)


async def test_a_scale_that_loses_its_label_costs_no_engine(life: Life):
    async with operator(life) as running:
        await life.run_up()
        await life.kubectl("scale", "rljs", f"sums-{POOL}", "--replicas=4")
        await life.until(lambda: _ready(life, 4))
        before = {pod["metadata"]["uid"] for pod in await life.pods(POOL)}
        await life.kubectl("label", "rljs", f"sums-{POOL}", "rljob.dev/job-")

        async def mended() -> bool:
            return f"sums-{POOL}" in await life.children("RLJobScale")

        await life.until(mended)
        await running.idle()
        assert (await life.role(POOL))["desired"] == 4
        assert {pod["metadata"]["uid"] for pod in await life.pods(POOL)} == before


async def test_exit_code_2_ends_the_run(life: Life):
    async with operator(life):
        await life.run_up()
        life.cluster.pods.exit(life.namespace, await life.any_pod("trainer"), 2, "the batch does not fit")
        message = await life.reason("ConfigurationError", "Failed")
        assert "the trainer refuses its configuration: exit code 2: the batch does not fit" in message
        assert (await life.condition("Ready"))[1] == "Failed"
        await life.no_pods("coordinator", "trainer")
        assert await life.pods("coordinator")
        assert [pod["status"]["phase"] for pod in await life.pods("trainer")] == ["Failed"], "its log cannot be read"
        assert (await life.status())["completionTime"]


async def test_suspending_frees_every_pod_and_resuming_goes_on(life: Life):
    async with operator(life):
        await life.run_up()
        claim = (await life.children("PersistentVolumeClaim"))["sums-storage"]["metadata"]["uid"]
        await life.kubectl("patch", "rlj", "sums", "--type=merge", "-p", '{"spec":{"suspend":true}}')
        await life.reason("Suspending")
        assert len(await life.pods()) == 6  # until the coordinator has answered
        await life.tell("Suspended")
        await life.reason("Suspended", "Suspended")
        assert await life.pods() == []
        assert (await life.children("PersistentVolumeClaim"))["sums-storage"]["metadata"]["uid"] == claim
        assert await life.children("ConfigMap")
        await life.change(suspend=False)
        attempt = await life.attempt(2)
        assert attempt["charged"] == 0
        await life.ready_pods()
        await life.tell("Running")
        await life.reason("Running")
        assert (await life.condition("Suspended"))[:2] == ("False", "Resumed")
        assert (await life.children("PersistentVolumeClaim"))["sums-storage"]["metadata"]["uid"] == claim


async def test_a_burst_of_suspend_and_resume_ends_as_it_was_written_last(life: Life):
    async with operator(life):
        await life.run_up(suspendGraceSeconds=1)
        for suspend in (True, False, True, False, True, False):
            await life.change(suspend=suspend)
        await life.until(lambda: _resumed(life))
        await life.ready_pods()
        assert len(await life.children("Job")) == 1


async def _resumed(life: Life) -> bool:
    body = await life.body()
    status = body["status"]
    return status["observedGeneration"] == body["metadata"]["generation"] and "suspendedAt" not in status


async def test_success_frees_accelerators_at_once_and_the_rest_in_its_time(life: Life):
    async with operator(life):
        await life.run_up(keepCoordinatorSeconds=1000)
        await life.tell("Succeeded", message="5 of 5 steps")
        assert await life.reason("Succeeded", "Complete") == "5 of 5 steps"
        await life.no_pods("coordinator")
        assert await life.pods("coordinator")
        await life.change(keepCoordinatorSeconds=await _soon(life))
        await life.no_pods()
        await life.change(ttlSecondsAfterFinished=await _soon(life))
        path = life._path("RLJob", "sums")
        await asyncio.to_thread(life.cluster.api.wait_gone, path)
        assert await life.children("PersistentVolumeClaim")  # retained
        await life.until(lambda: _nothing_but_the_claim(life))


async def _soon(life: Life, since: str = "completionTime") -> int:
    """Return the seconds from a time in the status to two seconds from now: however busy the machine is, a deadline
    then is neither past already nor long in coming."""
    began = datetime.fromisoformat((await life.status())[since])
    return ceil((datetime.now(UTC) - began).total_seconds()) + 2


async def _nothing_but_the_claim(life: Life) -> bool:
    kinds = ("StatefulSet", "Deployment", "Job", "ConfigMap", "ServiceAccount", "Role", "RoleBinding", "Service")
    kinds += ("PodDisruptionBudget", "NetworkPolicy", "RLJobScale", "Pod")
    return not any([await life.children(kind) for kind in kinds])


async def test_pods_that_find_no_accelerator_say_so_and_fail_the_run_in_time(life: Life):
    async with operator(life, cluster=GPUS):
        await life.apply(
            trainer={"processesPerNode": 64},
            failurePolicy={"pendingSeconds": 3},
        )
        message = await life.reason("PodsPending")
        assert message == "1 of 1 trainer pod pending: insufficient nvidia.com/gpu"
        assert (await life.status())["pendingSince"]
        await life.reason("PendingTimeout", "Failed")
        await life.no_pods("coordinator")


async def test_a_claim_of_the_users_whose_class_is_not_there_has_its_class_named(life: Life):
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}, "storageClassName": "nope"}
    meta = {"name": "mine", "namespace": life.namespace}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": spec}
    await asyncio.to_thread(life.cluster.api.create, claim)
    async with operator(life):
        await life.apply(storage={"claim": "mine"})

        async def named() -> bool:
            return "claim mine (spec.storage.claim) wants StorageClass nope" in (await life.condition("Ready"))[2]

        await life.until(named)


async def test_a_quota_that_is_exceeded_is_named(life: Life):
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "3"}}}
    life.cluster.api.post(f"/api/v1/namespaces/{life.namespace}/resourcequotas", quota)
    async with operator(life):
        await life.apply()
        assert "exceeded quota: few" in await life.reason("QuotaExceeded")


async def test_a_part_that_crashes_says_how(life: Life):
    async with operator(life):
        await life.apply(runner={"template": annotated(**{"exit-code": "1", "message": "ImportError: no module x"})})
        message = await life.reason("CrashLoop")
        assert message.startswith("1 of 1 runner pod crashing: exit code 1: ImportError: no module x")


async def test_kubectl_scales_a_pool_up_and_engines_are_drained_on_the_way_down(life: Life):
    async with operator(life):
        await life.run_up()
        await life.kubectl("scale", "rljs", f"sums-{POOL}", "--replicas=4")
        await life.until(lambda: _ready(life, 4))
        engines = [{"name": pod["metadata"]["name"], "load": 5} for pod in await life.pods(POOL)]
        await life.tell("Running", engines=engines)
        await life.kubectl("scale", "rljs", f"sums-{POOL}", "--replicas=3")
        leaving = (await life.until(lambda: _draining(life)))[0]
        assert len(await life.pods(POOL)) == 4  # it has work
        drained = [{**engine, "drained": engine["name"] == leaving} for engine in engines]
        await life.tell("Running", engines=drained)
        await life.until(lambda: _ready(life, 3))
        assert leaving not in {pod["metadata"]["name"] for pod in await life.pods(POOL)}

        async def settled() -> bool:
            return not (await life.status()).get("draining")

        await life.until(settled)
        scale = (await life.children("RLJobScale"))[f"sums-{POOL}"]
        assert scale["status"]["replicas"] == 3
        assert scale["spec"]["replicas"] == 3
        assert (await life.events()).count("Running") == 1  # it was ready all the time


async def _ready(life: Life, count: int) -> bool:
    role = await life.role(POOL)
    return bool(role.get("ready") == role.get("desired") == count == len(await life.pods(POOL)))


async def _draining(life: Life) -> list[str]:
    found: list[str] = (await life.status()).get("draining", [])
    return found


async def test_a_job_that_another_controller_manages_is_left_alone(life: Life):
    async with operator(life) as running:
        await life.apply(managedBy="example.com/other")
        await running.idle()
        assert await life.status() == {}
        assert await _nothing_but_the_claim(life)
        assert await life.children("PersistentVolumeClaim") == {}


async def test_a_retained_claim_is_taken_over_by_the_same_job_and_by_no_other(life: Life):
    async with operator(life):
        await life.run_up()
        claim = (await life.children("PersistentVolumeClaim"))["sums-storage"]["metadata"]["uid"]
        await life.delete()
        await life.until(lambda: _nothing_but_the_claim(life))
        await life.apply(seed=7)
        message = await life.reason("NameConflict")
        assert "sums-storage" in message
        assert "another name" in message
        assert await life.pods() == []
        await life.delete()
        await life.until(lambda: _nothing_but_the_claim(life))
        await life.run_up()
        assert (await life.children("PersistentVolumeClaim"))["sums-storage"]["metadata"]["uid"] == claim


async def test_a_job_waits_while_another_uses_its_claim(life: Life):
    second = Life(life.cluster, life.namespace, "second")
    async with operator(life):
        await life.run_up(keepCoordinatorSeconds=600)
        await second.apply(storage={"claim": "sums-storage"}, initializer={"command": ["make-model"]})
        assert "claim sums-storage is in use by RLJob sums;" in await second.reason("ClaimInUse")
        await life.tell("Succeeded")
        await life.no_pods("coordinator")

        async def says_that_it_has_ended() -> bool:
            return "has ended and whose coordinator is kept for 600 s" in (await second.condition("Ready"))[2]

        await second.until(says_that_it_has_ended)
        assert (await second.condition("Initialized"))[:2] == ("False", "ClaimInUse")
        assert not await second.children("Job") and not await second.children("StatefulSet")
        await life.delete()
        await second.ready_pods()
        assert (await second.condition("Initialized"))[1] == "Initialized"


async def test_a_claim_that_is_not_retained_goes_with_the_job(life: Life):
    async with operator(life):
        await life.run_up(storage={"retention": "Delete"})
        await life.delete()
        await life.until(lambda: _nothing_but_the_claim(life))

        async def gone() -> bool:
            return not await life.children("PersistentVolumeClaim")

        await life.until(gone)


async def test_a_name_of_63_characters_works(cluster: ControlPlane, namespace: str):
    life = Life(cluster, namespace, "a" * 62 + "z")
    async with operator(life):
        await life.run_up(rollouts=[{"name": "p" * 63, "replicas": {"min": 1, "max": 2}}])
        names = [name for kind in ("Job", "Deployment", "StatefulSet", "Service") for name in await life.children(kind)]
        assert names
        assert max(map(len, names)) <= 52
        life.cluster.pods.exit(namespace, await life.any_pod("trainer"), 1)
        await life.attempt(2)


async def test_kubectl_shows_why_a_job_does_not_run(life: Life):
    async with operator(life, cluster=GPUS):
        await life.apply(trainer={"processesPerNode": 64})
        await life.until(lambda: _ready(life, 2))
        message = await life.reason("PodsPending")
        head, row = (await life.kubectl("get", "rlj")).splitlines()
        assert " ".join(head.split()) == "NAME READY STEP PROGRESS TRAINER ROLLOUT REWARD STALENESS AGE"
        assert row.split()[:5] == ["sums", "PodsPending", "0/1", "2/2", "1/1"]
        assert message in await life.kubectl("get", "rlj", "-o", "wide")
        said = await life.kubectl("describe", "rlj", "sums")
        assert message in said
        assert "PodsPending" in said.partition("Events:")[2]
