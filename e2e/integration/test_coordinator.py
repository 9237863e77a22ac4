"""A real coordinator with its RLJob in a real API server, and with the rights of the rendered Role."""

from __future__ import annotations

import asyncio
import json
import shutil
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from e2e.fakes.engine import Faults
from e2e.fakes.harness import Harness, make_job, run_harness
from rljob.api.models import RLJob
from rljob.coordinator import rljob_client
from rljob.coordinator.rljob_client import JobRef, RLJobClient
from rljob.kube.errors import ConflictError
from rljob.manifests import render
from rljob.manifests.inputs import RenderTarget
from rljob.protocol.backoff import Backoff
from tools.cluster.client import ApiError
from tools.cluster.controlplane import ControlPlane

API = "rljob.dev/v1alpha1"
RBAC = "rbac.authorization.k8s.io/v1"
PODS = ("sums-rollout-main-one", "sums-rollout-main-two")
Probe = Callable[[dict[str, Any]], Any]


def manifest(namespace: str, name: str, job: RLJob) -> dict[str, Any]:
    """Return ``job`` as an object for the API server."""
    body: dict[str, Any] = job.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    return body | {"apiVersion": API, "kind": "RLJob", "metadata": {"name": name, "namespace": namespace}}


@dataclass
class InCluster:
    """One RLJob in the API server."""

    cluster: ControlPlane
    namespace: str
    body: dict[str, Any]
    account: Path

    @property
    def name(self) -> str:
        return str(self.body["metadata"]["name"])

    @property
    def job_ref(self) -> JobRef:
        return JobRef(self.cluster.url, self.namespace, self.name, self.body["metadata"]["uid"], self.account)

    @property
    def path(self) -> str:
        return str(self.cluster.api.path(API, "RLJob", self.namespace, self.name))

    def variables(self) -> dict[str, str]:
        """Return the environment variables of the coordinator's pod, with those that the kubelet adds."""
        return {
            "RLJOB_NAMESPACE": self.namespace,
            "RLJOB_JOB_NAME": self.name,
            "RLJOB_JOB_UID": self.body["metadata"]["uid"],
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(self.cluster.ports["apiserver"]),
            "RLJOB_SERVICE_ACCOUNT": str(self.account),
        }

    def get(self) -> dict[str, Any]:
        return self.cluster.api.get(self.path)

    def set_spec(self, **fields: Any) -> int:
        """Change the spec; return its generation."""
        return int(self.cluster.api.patch(self.path, {"spec": fields})["metadata"]["generation"])

    def apply_status(self, **fields: Any) -> None:
        """Apply fields of the status as the operator does."""
        identity = {"apiVersion": API, "kind": "RLJob", "metadata": {"name": self.name}}
        self.cluster.api.apply(f"{self.path}/status", {**identity, "status": fields}, "rljob-operator")

    async def until(self, probe: Probe, seconds: float = 120.0) -> dict[str, Any]:
        """Wait until ``probe`` of status.run is true; return status.run."""

        def look() -> dict[str, Any] | None:
            run = self.get().get("status", {}).get("run")
            return run if run and probe(run) else None

        return await asyncio.to_thread(self.cluster.api.wait_for, look, seconds)


def make(cluster: ControlPlane, namespace: str, tmp_path: Path, job: RLJob, name: str = "sums") -> InCluster:
    """Create the RLJob, and the service account of its coordinator with the rendered Role."""
    body = cluster.api.create(manifest(namespace, name, job))
    named = job.model_copy(update={"metadata": job.metadata.model_copy(update={"name": name})})
    roles = render(named, RenderTarget(namespace=namespace, uid=body["metadata"]["uid"]))
    for found in next(role for role in roles if role.kind == "access").objects:
        cluster.api.create(found)
    cluster.wait_allowed(f"{namespace}:{name}-coordinator", namespace, "patch", "rljobs/status", "rljob.dev", name)
    account = tmp_path / f"account-{name}"
    account.mkdir()
    (account / "token").write_text(cluster.service_account_token(namespace, f"{name}-coordinator"))
    shutil.copy(cluster.authority, account / "ca.crt")
    return InCluster(cluster, namespace, body, account)


@asynccontextmanager
async def running(
    cluster: ControlPlane, namespace: str, tmp_path: Path, job: RLJob, slow: float = 0.0
) -> AsyncIterator[tuple[InCluster, Harness]]:
    """Run ``job`` with two engines and without a trainer."""
    rljob = make(cluster, namespace, tmp_path, job)
    storage = tmp_path / "storage"
    storage.mkdir()
    async with run_harness(job, storage, (Faults(), Faults()), slow, pods=PODS, variables=rljob.variables()) as harness:
        yield rljob, harness


def step(harness: Harness) -> int:
    """Return the step that the coordinator reports."""
    with urllib.request.urlopen(f"{harness.coordinator_url}/v1/status", timeout=10) as answer:
        return int(json.load(answer)["progress"]["step"])


async def continues(harness: Harness, steps: int = 1) -> int:
    """Wait until the coordinator reports ``steps`` more steps; return the step."""
    wanted = await asyncio.to_thread(step, harness) + steps
    while await asyncio.to_thread(step, harness) < wanted:
        await asyncio.sleep(0.05)
    return wanted


async def train(harness: Harness) -> None:
    """Start a trainer; wait until it has applied two batches."""
    await harness.start("trainer", "--seconds-per-step", "0.1")
    await harness.until("trainer", "applied batch 1.")


async def suspended(rljob: RLJobClient, harness: Harness, generation: int) -> None:
    """Wait until the run is suspended by this generation, with a checkpoint of its last step and no trainer."""
    run = await rljob.until(lambda run: run["state"] == "Suspended")
    assert run["observedGeneration"] == generation
    assert run["lastCheckpoint"]["step"] == run["progress"]["step"] >= 2
    await harness.ended("trainer")


async def close(*jobs: RLJobClient) -> None:
    """Close clients; wait until their TLS connections are closed too, which takes longer."""
    for job in jobs:
        await job.close()
    transports = list(asyncio.get_running_loop()._transports.values())
    while any(transport.get_extra_info("socket").fileno() != -1 for transport in transports):
        await asyncio.sleep(0.01)


def engines(run: dict[str, Any]) -> dict[str, bool]:
    return {engine["name"]: engine.get("drained", False) for engine in run["engines"]}


@pytest.mark.timeout(300)
async def test_a_run_is_reported_in_the_rljobs_status_and_columns(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async with running(cluster, namespace, tmp_path, make_job()) as (rljob, harness):
        first = await rljob.until(lambda run: len(run["engines"]) == 2)
        assert first["state"] in ("Starting", "Running") and "waiting for the trainer" in first["message"]
        assert set(engines(first)) == set(PODS)
        harness.play("trainer", harness.trainer().run())
        run = await rljob.until(lambda run: run["state"] == "Succeeded")
        assert run["progress"]["text"] == "8/8 100%"
        assert run["policy"]["version"] == 7 and run["lastCheckpoint"]["step"] == 8
        assert run["observedGeneration"] == 1
        managers = {entry["manager"]: entry for entry in rljob.get()["metadata"]["managedFields"]}
        owned = managers["rljob-coordinator"]
        assert (owned["operation"], owned["subresource"], set(owned["fieldsV1"])) == ("Apply", "status", {"f:status"})
        assert set(owned["fieldsV1"]["f:status"]) == {"f:run"}
        shown = cluster.kubectl("get", "rlj", "-n", namespace)
        assert "8/8 100%" in shown
        with urllib.request.urlopen(f"{harness.coordinator_url}/metrics", timeout=10) as answer:
            metrics = answer.read().decode()
        assert "rljob_status_applied_age_seconds" in metrics
        assert 'rljob_api_requests_total{code="200",verb="apply"}' in metrics


@pytest.mark.timeout(300)
async def test_a_suspended_job_writes_a_checkpoint_and_resumes_from_it(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    job = make_job(checkpoints={"everySteps": 100})
    async with running(cluster, namespace, tmp_path, job, slow=0.001) as (rljob, harness):
        await train(harness)
        generation = rljob.set_spec(suspend=True)
        await suspended(rljob, harness, generation)
        resumed = rljob.set_spec(suspend=False)
        await harness.ended("coordinator")  # the change came too late; in a pod the container starts again
        run = rljob.get()["status"]["run"]
        assert (run["state"], run["observedGeneration"]) == ("Suspended", generation)
        await harness.start("coordinator")
        await harness.start("trainer")
        run = await rljob.until(lambda run: run["state"] == "Succeeded")
        assert run["observedGeneration"] == resumed


@pytest.mark.timeout(300)
async def test_a_job_that_kueue_evicts_writes_a_checkpoint(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    job = make_job(checkpoints={"everySteps": 100})
    async with running(cluster, namespace, tmp_path, job, slow=0.001) as (rljob, harness):
        await train(harness)
        rljob.apply_status(evictedAt="2026-11-28T00:00:00Z")  # as the operator does
        await suspended(rljob, harness, 1)


@pytest.mark.timeout(300)
async def test_a_suspension_that_is_cancelled_in_time_does_not_interrupt_the_run(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async with running(cluster, namespace, tmp_path, make_job(), slow=0.001) as (rljob, harness):
        await harness.start("trainer", "--seconds-per-step", "2")
        await harness.until("trainer", "applying batch 0.")
        rljob.set_spec(suspend=True)
        await harness.until("coordinator", "suspending at version 0")
        generation = rljob.set_spec(suspend=False)
        await harness.until("coordinator", "suspension cancelled at version")
        await rljob.until(lambda run: run["observedGeneration"] == generation)
        await harness.until("trainer", "applied batch 1.")
        assert rljob.get()["status"]["run"]["state"] == "Running"


@pytest.mark.timeout(300)
async def test_draining_engines_finish_their_requests_and_get_no_new_ones(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    job = make_job(training={"steps": 200, "promptsPerStep": 4, "samplesPerPrompt": 4, "maxStaleness": 1})
    async with running(cluster, namespace, tmp_path, job, slow=0.002) as (rljob, harness):
        harness.play("trainer", harness.trainer().run())
        await rljob.until(lambda run: run["progress"]["step"] > 0 and len(run["engines"]) == 2)
        rljob.apply_status(draining=[PODS[1]])
        run = await rljob.until(lambda run: engines(run).get(PODS[1]))
        assert engines(run) == {PODS[0]: False, PODS[1]: True}
        await continues(harness)  # one engine is enough
        rljob.apply_status(draining=[])
        await rljob.until(lambda run: not any(engines(run).values()))


@pytest.mark.timeout(300)
async def test_the_run_continues_without_the_api_server_and_reports_when_it_is_back(
    cluster: ControlPlane, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(training={"steps": 500, "promptsPerStep": 4, "samplesPerPrompt": 4, "maxStaleness": 1})
    async with running(cluster, namespace, tmp_path, job, slow=0.002) as (rljob, harness):
        harness.play("trainer", harness.trainer().run())
        await rljob.until(lambda run: run["progress"]["step"] > 0)
        cluster.stop("apiserver")
        await harness.until("coordinator", "the run continues")
        reached = await continues(harness, 5)
        cluster.start("apiserver")  # must run in this thread, see Process
        await rljob.until(lambda run: run["progress"]["step"] >= reached)
        generation = rljob.set_spec(suspend=True)
        run = await rljob.until(lambda run: run["state"] == "Suspended")
        assert run["observedGeneration"] == generation
        assert harness.restarts["coordinator"] == 0
        log_text = (tmp_path / "storage" / "coordinator.log").read_text()
        assert log_text.count("following the job's RLJob: it works again") == 1


@pytest.mark.timeout(300)
def test_the_coordinator_may_access_only_its_own_job(cluster: ControlPlane, namespace: str, tmp_path: Path) -> None:
    mine = make(cluster, namespace, tmp_path, make_job())
    other = make(cluster, namespace, tmp_path, make_job(), "other")
    client = cluster.client((mine.account / "token").read_text())
    assert client.get(mine.path)["metadata"]["name"] == "sums"
    everything = cluster.api.path(API, "RLJob", namespace)
    assert client.list(everything, fieldSelector="metadata.name=sums")
    forbidden: list[Callable[[], Any]] = [
        lambda: client.get(other.path),
        lambda: client.list(everything),
        lambda: client.list(everything, fieldSelector="metadata.name=other"),
        lambda: client.patch(mine.path, {"spec": {"suspend": True}}),
        lambda: client.patch(f"{other.path}/status", {"status": {"run": {"state": "Failed"}}}),
        lambda: client.delete(mine.path),
        lambda: client.list(f"/api/v1/namespaces/{namespace}/secrets"),
        lambda: client.list(f"/api/v1/namespaces/{namespace}/pods"),
    ]
    for attempt in forbidden:
        with pytest.raises(ApiError) as refused:
            attempt()
        assert refused.value.code == 403


@pytest.mark.timeout(300)
async def test_operator_and_coordinator_write_one_status_and_keep_each_others_fields(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    rljob = make(cluster, namespace, tmp_path, make_job())
    own = RLJobClient(rljob.job_ref)
    try:
        await own.apply_run({"state": "Running", "queues": [{"name": "waiting", "value": 3}]})
        rljob.apply_status(observedGeneration=1, draining=["a"])
        await own.apply_run({"state": "Running", "message": "now without queues"})
        rljob.apply_status(observedGeneration=2)  # the coordinator writes with its older resource version
        await own.apply_run({"state": "Running", "message": "now without queues"})
        status = rljob.get()["status"]
        assert status["run"]["message"] == "now without queues" and not status["run"].get("queues")
        assert (status["observedGeneration"], status.get("draining", [])) == (2, [])
    finally:
        await close(own)


@pytest.mark.timeout(300)
async def test_a_job_of_the_same_name_with_another_uid_is_ignored_and_reported_as_gone(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    rljob = make(cluster, namespace, tmp_path, make_job())
    old, new = RLJobClient(replace(rljob.job_ref, uid="uid-of-a-deleted-job")), RLJobClient(rljob.job_ref)
    tasks: list[asyncio.Task[None]] = []
    received: list[tuple[RLJobClient, str]] = []
    try:
        for job in (old, new):
            tasks.append(
                asyncio.create_task(job.follow(lambda seen, job=job: received.append((job, seen.metadata.uid))))
            )
        while not (old.last_event_at and new.last_event_at):
            await asyncio.sleep(0.01)
        assert old.gone and not new.gone
        cluster.api.delete(rljob.path)
        while not new.gone:
            await asyncio.sleep(0.01)
        assert {(job, uid) for job, uid in received} == {(new, rljob.job_ref.uid)}
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await close(old, new)


@pytest.mark.timeout(300)
async def test_no_status_is_written_to_another_job_of_the_same_name(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    rljob = make(cluster, namespace, tmp_path, make_job())
    old = RLJobClient(replace(rljob.job_ref, uid="11111111-2222-3333-4444-555555555555"))
    own = RLJobClient(rljob.job_ref)
    try:
        with pytest.raises(ConflictError, match="was replaced by another one") as refused:
            await old.apply_run({"state": "Succeeded"})
        assert refused.value.code == 409
        version = await own.apply_run({"state": "Running"})
        assert str(version) == rljob.get()["metadata"]["resourceVersion"]
        for kind, group in (
            ("ServiceAccount", "v1"),
            ("Role", RBAC),
            ("RoleBinding", RBAC),
        ):  # they must outlive the job here
            path = cluster.api.path(group, kind, namespace, "sums-coordinator")
            cluster.api.patch(path, {"metadata": {"ownerReferences": None}})
        cluster.api.delete(rljob.path)
        await asyncio.to_thread(cluster.api.wait_gone, rljob.path)
        cluster.api.create(manifest(namespace, "sums", make_job()))
        with pytest.raises(ConflictError, match="was replaced by another one"):
            await own.apply_run({"state": "Succeeded"})
        assert own.gone and "run" not in rljob.get().get("status", {})
    finally:
        await close(old, own)


@pytest.mark.timeout(300)
async def test_a_final_state_that_a_user_removed_from_the_status_is_written_again(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async with running(cluster, namespace, tmp_path, make_job()) as (rljob, harness):
        harness.play("trainer", harness.trainer().run())
        await rljob.until(lambda run: run["state"] == "Succeeded")
        for changed in ({"run": None}, {"run": {"state": "Running", "reason": None}}):
            cluster.api.patch(f"{rljob.path}/status", {"status": changed})
            await rljob.until(lambda run: run["state"] == "Succeeded" and run["progress"]["step"] == 8)


@pytest.mark.timeout(300)
async def test_no_change_is_missed_when_watches_end_or_their_version_is_gone(
    cluster: ControlPlane, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rljob_client, "WATCH_SECONDS", 1)
    monkeypatch.setattr(rljob_client, "Backoff", partial(Backoff, 0.01))
    rljob = make(cluster, namespace, tmp_path, make_job())
    own = ExpiredListClient(rljob.job_ref)
    views: asyncio.Queue[rljob_client.RLJobView] = asyncio.Queue()
    following = asyncio.create_task(own.follow(views.put_nowait))
    try:
        await views.get()
        for generation in range(2, 6):
            before = watches_ended()
            while watches_ended() == before:  # the change comes without a watch, or while one starts
                await asyncio.sleep(0.01)
            rljob.set_spec(suspend=generation % 2 == 0)
            while (seen := await views.get()).metadata.generation < generation:
                pass
            assert seen.spec.suspend == (generation % 2 == 0)
        assert own.expired
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await close(own)


class ExpiredListClient(RLJobClient):
    """A client whose first list has a resource version that the API server has compacted."""

    expired = False

    async def _list(self) -> Any:
        listed = await super()._list()
        if not self.expired:
            self.expired = True
            listed.metadata.resource_version = "1"
        return listed


def watches_ended() -> float:
    """Return the number of watches of this process that ended with status 200."""
    return rljob_client.API_REQUESTS.labels("watch", "200")._value.get()
