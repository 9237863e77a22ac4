"""Gangs of Volcano, scheduler-plugins and Kueue: their types on a real API server, and doubles of their controllers.

The projects themselves were never run. Strict validation shows that their types accept what the operator writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.tests.goldens import JOB
from e2e.integration.gang_doubles import COSCHEDULING, VOLCANO, KueueDouble, SchedulerDouble
from e2e.integration.gang_jobs import (
    GPUS,
    POOL,
    bound,
    gang_bound,
    gone,
    gpu_nodes,
    members,
    operator,
    whole,
    with_gang,
)
from e2e.integration.job_lifecycle import JobClient
from e2e.integration.operators import Object
from rljob.api.load import load
from rljob.manifests import render
from rljob.manifests.inputs import Cluster, RenderTarget
from tools.cluster.controlplane import ControlPlane
from tools.cluster.fixtures import ROOT

CRDS = os.environ.get("RLJOB_THIRD_PARTY_CRDS", "")
NO_CRDS = "RLJOB_THIRD_PARTY_CRDS names no directory with the CustomResourceDefinitions of other projects"
pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(not CRDS, reason=NO_CRDS)]

KINDS = {"volcano": VOLCANO, "coscheduling": COSCHEDULING}
SCHEDULERS = Cluster(
    accelerator="nvidia",
    access_modes=("ReadWriteOnce",),
    requests_per_gpu={"cpu": "0.01", "memory": "1Mi"},
    gang_scheduler=COSCHEDULING.scheduler,
)
CHECKED = {"dryRun": "All", "fieldValidation": "Strict"}
LABEL, TAINT = "example.com/pool", {"key": "example.com/h100", "value": "yes", "effect": "NoSchedule"}


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """A control plane without nodes, with the types of all three projects."""
    types = [path for path in Path(CRDS).glob("*.yaml") if path.name.startswith(("kueue", "scheduling."))]
    with ControlPlane(manifests=[*sorted(ROOT.glob("crds/*.yaml")), *sorted(types)]) as made:
        yield made


def settings(provider: str) -> Cluster:
    """Return the settings of a cluster; the second scheduler of scheduler-plugins has a name of its own."""
    return SCHEDULERS if provider == "coscheduling" else GPUS


@pytest.mark.parametrize("provider", ["volcano", "coscheduling", "kueue"])
def test_the_types_of_the_project_accept_the_rendered_objects_strictly(plane: ControlPlane, where: str, provider: str):
    queue = "" if provider == "coscheduling" else ", queue: research"
    fixed = [f"spec.{role}.replicas.max=null" for role in ("rollouts[0]", "rewards[0]", "runner")]
    job = load(JOB, [f"spec.scheduling.gang={{provider: {provider}{queue}}}", *(fixed if provider == "kueue" else ())])
    plane.api.warnings.clear()
    target = RenderTarget(settings(provider), where, priority=1)
    [described] = [role for role in render(job, target) if role.kind == "group"]
    [made] = described.objects
    collection = plane.api.path(made["apiVersion"], made["kind"], where)
    plane.api.post(collection, made, **CHECKED)
    plane.api.apply(f"{collection}/{made['metadata']['name']}", made, **CHECKED)
    assert plane.api.warnings == []


@pytest.mark.parametrize("provider", KINDS)
async def test_of_two_jobs_on_three_nodes_one_is_whole_and_the_other_has_no_pod_bound(
    plane: ControlPlane, where: str, provider: str
):
    one, other = JobClient(plane, where, "one"), JobClient(plane, where, "other")
    with gpu_nodes(plane, 3):
        async with (
            SchedulerDouble(plane.api, KINDS[provider]).running(),
            operator(plane, where, cluster=settings(provider)) as running,
        ):
            await one.apply(**with_gang(provider))
            await whole(one)
            await other.apply(**with_gang(provider))
            await other.reason("GangPending")
            await other.says("none of the 9 pods of the gang has a node: insufficient nvidia.com/gpu")
            assert (await gang_bound(one), await gang_bound(other)) == (9, 0)
            await running.settled("other")
            await gone(one)
            await whole(other)


@pytest.mark.parametrize("provider", KINDS)
async def test_elastic_engines_are_no_members_and_a_pod_group_follows_the_manifest(
    plane: ControlPlane, where: str, provider: str
):
    job, kind = JobClient(plane, where), KINDS[provider]
    pools = [{"name": "main", "replicas": {"min": 2, "max": 4}, "autoscaling": {"provider": "none"}}]
    groups = f"/apis/{kind.api_version}/namespaces/{where}/podgroups"

    async def group() -> Object:
        found: Object = (await asyncio.to_thread(plane.api.get, f"{groups}/sums-gang"))["spec"]
        return found

    async def grown() -> bool:
        return (await group())["minMember"] == 4

    with gpu_nodes(plane, 2):
        async with (
            SchedulerDouble(plane.api, kind).running(),
            operator(plane, where, cluster=settings(provider)) as running,
        ):
            await job.apply(**with_gang(provider, rollouts=pools))
            await whole(job, 3)
            await job.kubectl("scale", "rljs", "sums-rollout-main", "--replicas=4")

            async def four() -> bool:
                return len(bound(await job.pods(POOL))) == 4

            await job.until(four)
            pods = [*await job.pods("trainer"), *await job.pods(POOL)]
            inside = [pod for pod in pods if kind.group_of(pod["metadata"]) == "sums-gang"]
            assert inside == members(pods) and len(inside) == 3
            assert {pod["spec"]["schedulerName"] for pod in pods} == {kind.scheduler}
            others = [pod for pod in await job.pods() if pod not in pods]
            assert {pod["spec"]["schedulerName"] for pod in others} == {"default-scheduler"}
            _check_details(provider, await group(), pods)
            await job.change(rollouts=[{**pools[0], "replicas": {"min": 3, "max": 4}}])
            await job.until(grown)
            await running.settled()


def _check_details(provider: str, group: Object, pods: list[Object]) -> None:
    if provider == "coscheduling":
        assert group == {"minMember": 3}
        return
    tasks = {pod["metadata"]["annotations"].get("volcano.sh/task-spec") for pod in members(pods)}
    assert tasks == group["minTaskMember"].keys() == {"trainer", POOL}
    assert group["minTaskMember"] == {"trainer": 1, POOL: 2} and group["queue"] == "default"
    assert group["minResources"] == {"cpu": "0.1", "memory": "10485760", "nvidia.com/gpu": "10"}


# --- Kueue ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def kueue(plane: ControlPlane, where: str) -> Iterator[KueueDouble]:
    """Kueue with a quota of 16 GPUs, whose flavor is on nodes with a label and a taint."""
    api, version = plane.api, KueueDouble.API
    tolerated = {"key": TAINT["key"], "operator": "Equal", "value": "yes", "effect": TAINT["effect"]}
    flavor = {"nodeLabels": {LABEL: "h100"}, "nodeTaints": [TAINT], "tolerations": [tolerated]}
    quota = {"name": "nvidia.com/gpu", "nominalQuota": "16"}
    queue = {
        "namespaceSelector": {},
        "resourceGroups": [
            {"coveredResources": ["nvidia.com/gpu"], "flavors": [{"name": KueueDouble.FLAVOR, "resources": [quota]}]}
        ],
    }
    for kind, name, spec in (
        ("ResourceFlavor", KueueDouble.FLAVOR, flavor),
        ("ClusterQueue", KueueDouble.QUEUE, queue),
    ):
        api.apply_object({"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec})
    local = {"metadata": {"name": "research", "namespace": where}, "spec": {"clusterQueue": KueueDouble.QUEUE}}
    api.create({"apiVersion": version, "kind": "LocalQueue", **local})
    return KueueDouble(api, where, 16)


def workload_path(job: JobClient) -> str:
    return f"/apis/{KueueDouble.API}/namespaces/{job.namespace}/workloads/{job.name}-gang"


async def workload(job: JobClient) -> Object:
    found: Object = await asyncio.to_thread(job.cluster.api.get, workload_path(job))
    return found


def conditions(workload: Object) -> dict[str, tuple[str, str]]:
    found = workload.get("status", {}).get("conditions", ())
    return {each["type"]: (each["status"], each["reason"]) for each in found}


async def test_a_job_waits_for_its_admission_and_its_pods_run_on_the_nodes_of_the_flavor(
    plane: ControlPlane, where: str, kueue: KueueDouble
):
    job = JobClient(plane, where)
    with gpu_nodes(plane, 1), tainted_nodes(plane, 2):
        async with operator(plane, where) as running:
            await job.apply(**with_gang("kueue", "research"))
            await job.reason("Queued")
            await job.says("Workload sums-gang waits in LocalQueue research of Kueue")
            await running.settled()
            assert await job.pods() == [], "also no pod without an accelerator"
            made = await workload(job)
            assert {each["name"]: each["count"] for each in made["spec"]["podSets"]} == {
                "coordinator": 1, "reward-sums": 1, "runner": 1, "trainer": 1, POOL: 8,
            }  # fmt: skip
            assert made["metadata"]["ownerReferences"][0]["kind"] == "RLJob"
            async with kueue.running():
                await whole(job)
                await job.ready_pods()
                for pod in members(await job.pods()):
                    assert pod["spec"]["nodeSelector"] == {LABEL: "h100"}
                    assert TAINT["key"] in {each.get("key") for each in pod["spec"]["tolerations"]}
                    assert pod["spec"]["nodeName"] in await flavored(plane)

                async def told() -> bool:
                    return conditions(await workload(job)).get("PodsReady") == ("True", "Started")

                await job.until(told)
                await running.settled()


async def test_an_evicted_job_writes_a_checkpoint_stops_and_continues_when_it_is_admitted_again(
    plane: ControlPlane, where: str, kueue: KueueDouble
):
    job, rival = JobClient(plane, where), JobClient(plane, where, "rival")
    with tainted_nodes(plane, 3):
        async with operator(plane, where) as running, kueue.running():
            await job.run_up(**with_gang("kueue", "research"))
            await rival.apply(**with_gang("kueue", "research"))
            await rival.reason("Queued")
            await rival.says("insufficient unused quota for nvidia.com/gpu")
            assert await gang_bound(rival) == 0
            await asyncio.to_thread(kueue.evict, workload_path(job), "Preempted", "Preempted to accommodate a workload")
            message = await job.reason("Suspending")
            assert "Kueue has evicted Workload sums-gang: Preempted" in message
            assert (await job.status())["evictedAt"], "the coordinator reads it"
            assert await gang_bound(job) == 9, "the run writes a checkpoint first"
            held = conditions(await workload(job))
            assert held["QuotaReserved"][0] == "True", "the pods still have the accelerators"
            await job.apply_run("Suspended")
            await whole(rival)
            assert await job.pods() == []
            after = conditions(await workload(job))
            assert after["QuotaReserved"] == ("False", "Pending") and after["Requeued"] == ("True", "Preempted")
            assert after["Admitted"][0] == "False" and "admission" not in (await workload(job))["status"]
            assert (await job.condition("Suspended"))[:2] == ("True", "Suspended")
            await job.reason("Queued")
            await running.settled()
            attempt = (await job.status())["trainer"]["number"]
            await gone(rival)
            await whole(job)
            assert (await job.status())["trainer"]["number"] == attempt + 1
            assert (await job.condition("Suspended"))[:2] == ("False", "Resumed")
            assert (await job.status()).get("evictedAt") is None


async def test_a_finished_job_and_a_suspended_job_give_their_quota_back(
    plane: ControlPlane, where: str, kueue: KueueDouble
):
    done, paused = JobClient(plane, where, "done"), JobClient(plane, where, "paused")
    with tainted_nodes(plane, 2):
        async with operator(plane, where), kueue.running():
            await done.run_up(**with_gang("kueue", "research"))
            await paused.apply(**with_gang("kueue", "research"))
            await done.apply_run("Succeeded")
            await whole(paused)
            await paused.change(suspend=True)
            await paused.apply_run("Suspended")
            await paused.reason("Suspended", "Suspended")
            assert not await asyncio.to_thread(plane.api.list, f"/apis/{KueueDouble.API}/namespaces/{where}/workloads")
            await paused.change(suspend=False)
            await whole(paused)


async def test_a_job_that_changes_its_size_is_queued_again(plane: ControlPlane, where: str, kueue: KueueDouble):
    job = JobClient(plane, where)
    with tainted_nodes(plane, 2):
        async with operator(plane, where) as running, kueue.running():
            await job.run_up(**with_gang("kueue", "research"))
            uid = (await workload(job))["metadata"]["uid"]
            await job.change(rollouts=[{"name": "main", "replicas": {"min": 4}}])
            message = await job.reason("Suspending")
            assert "Workload sums-gang was admitted for other pods" in message
            await job.apply_run("Suspended")
            await whole(job, 5)
            made = await workload(job)
            assert made["metadata"]["uid"] != uid
            assert {each["name"]: each["count"] for each in made["spec"]["podSets"]}[POOL] == 4
            await running.settled()


async def test_a_workload_that_waits_follows_the_manifest_and_a_setting_of_the_run_keeps_the_admission(
    plane: ControlPlane, where: str, kueue: KueueDouble
):
    job = JobClient(plane, where)
    plane.api.apply_object(
        {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": where}, "value": 7}
    )

    async def asks(cpu: str) -> bool:
        spec = (await workload(job))["spec"]
        [runner] = [each for each in spec["podSets"] if each["name"] == "runner"]
        [main] = runner["template"]["spec"]["containers"]
        return spec["priority"] == 7 and main["resources"]["requests"]["cpu"] == cpu

    with tainted_nodes(plane, 2):
        async with operator(plane, where) as running:
            scheduling = {**with_gang("kueue", "research")["scheduling"], "priorityClassName": where}
            await job.apply(**{**with_gang("kueue", "research"), "scheduling": scheduling})
            await job.reason("Queued")
            await job.change(runner={"template": template("2m")})
            await job.until(lambda: asks("2m"))
            async with kueue.running():
                await whole(job)
                await job.ready_pods()
                uid = (await workload(job))["metadata"]["uid"]
                await job.change(
                    training={"steps": 9}, runner={"template": template("2m", env=[{"name": "A", "value": "b"}])}
                )
                await running.settled()
                assert (await workload(job))["metadata"]["uid"] == uid
                assert (await job.condition("Suspended"))[1] != "Suspending"
                await job.change(runner={"template": template("3m")})
                await job.reason("Suspending")


def template(cpu: str, **main: Object) -> Object:
    """Return a template whose container demands CPU."""
    return {"spec": {"containers": [{"name": "main", "resources": {"requests": {"cpu": cpu}}, **main}]}}


async def test_a_job_with_a_rejected_spec_stops_when_it_is_evicted(plane: ControlPlane, where: str, kueue: KueueDouble):
    job = JobClient(plane, where)
    with tainted_nodes(plane, 2):
        async with operator(plane, where) as running, kueue.running():
            await job.run_up(**with_gang("kueue", "research"))
            await job.change(trainer={"accelerator": {"profile": "unknown"}})
            await job.reason("InvalidSpec")
            await asyncio.to_thread(kueue.evict, workload_path(job), "Preempted", "Preempted to accommodate a workload")
            await job.reason("Suspending", "Suspended")
            await job.apply_run("Suspended")
            await job.reason("Suspended", "Suspended")
            await running.settled()
            assert await job.pods() == [] and (await job.condition("Ready"))[1] == "InvalidSpec"
            await job.change(trainer={"accelerator": {"profile": None}})
            await whole(job)


async def test_a_deactivated_workload_stops_its_job(plane: ControlPlane, where: str, kueue: KueueDouble):
    job = JobClient(plane, where)
    with tainted_nodes(plane, 2):
        async with operator(plane, where) as running, kueue.running():
            await job.run_up(**with_gang("kueue", "research"))
            await asyncio.to_thread(plane.api.patch, workload_path(job), {"spec": {"active": False}})
            await asyncio.to_thread(kueue.evict, workload_path(job), "Deactivated", "The workload is deactivated")
            await job.reason("Suspending")
            await job.apply_run("Suspended")
            await job.says("it is deactivated; set its spec.active to true")
            await running.settled()
            assert await job.pods() == []


async def test_a_default_queue_labels_no_child_because_the_job_is_their_controller(
    plane: ControlPlane, where: str, kueue: KueueDouble
):
    """Kueue labels Jobs and Deployments without a controller that it knows; RLJob must be in externalFrameworks."""
    job = JobClient(plane, where)
    with tainted_nodes(plane, 2):
        async with operator(plane, where), kueue.running():
            await job.apply(**with_gang("kueue", "research"))
            await whole(job)
            children = [*(await job.children("Job")).values(), *(await job.children("Deployment")).values()]
            for child in children:
                [owner] = [each for each in child["metadata"]["ownerReferences"] if each.get("controller")]
                assert (owner["apiVersion"], owner["kind"]) == ("rljob.dev/v1alpha1", "RLJob")
                assert "kueue.x-k8s.io/queue-name" not in child["metadata"]["labels"]


@contextlib.contextmanager
def tainted_nodes(plane: ControlPlane, count: int) -> Iterator[None]:
    """Have nodes of the flavor, and one without GPUs for the other roles."""
    [plain] = plane.nodes(1, gpus=0)
    try:
        with gpu_nodes(plane, count, [TAINT], **{LABEL: "h100"}):
            yield
    finally:
        plane.api.delete(f"/api/v1/nodes/{plain}")


async def flavored(plane: ControlPlane) -> set[str]:
    nodes = await asyncio.to_thread(plane.api.list, "/api/v1/nodes", labelSelector=f"{LABEL}=h100")
    return {node["metadata"]["name"] for node in nodes}
