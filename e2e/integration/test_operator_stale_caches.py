"""The operator decides on caches, which may be older than the API server: what happens when they are."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from e2e.integration.namespace import NamespaceClient
from e2e.integration.operators import Object, job
from rljob.kube.errors import ConflictError
from rljob.kube.kubeconfig import from_kubeconfig
from rljob.manifests.inputs import Cluster
from rljob.manifests.names import JOB
from rljob.operator.api_types import Meta
from rljob.operator.executor import Executor
from rljob.operator.informers import Caches
from rljob.operator.load_sampler import LoadSampler
from rljob.operator.metrics import Metrics
from rljob.operator.object_kinds import SCALE
from rljob.operator.operator_client import OperatorClient
from rljob.operator.plan import Plan
from rljob.operator.reconcile import Reconciler
from rljob.operator.recorder import Recorder
from rljob.operator.service import RLJobPlanner
from tools.cluster.controlplane import ControlPlane

STATUS = {"replicas": 3, "selector": "decided=before"}


def ignored(_: Any) -> None:
    """Ignore an event of a cache."""


@pytest.fixture
async def client(cluster: ControlPlane) -> AsyncIterator[OperatorClient]:
    async with OperatorClient(from_kubeconfig(cluster.kubeconfig)) as made:
        yield made


@pytest.fixture
def caches(client: OperatorClient, namespace: str) -> Caches:
    """Caches that nothing fills but the test."""
    return Caches(client, [namespace], on_change=ignored, on_pod=ignored, metrics=Metrics())


@pytest.fixture
def objects(cluster: ControlPlane, namespace: str) -> NamespaceClient:
    return NamespaceClient(cluster, namespace)


async def patch_status(client: OperatorClient, caches: Caches, scale: Object) -> None:
    """Execute a change of the status of an RLJobScale that the cache knows as ``scale``."""
    caches.children[SCALE].put(json.dumps(scale).encode())
    meta = Meta("sums", scale["metadata"]["namespace"], "uid", generation=1)
    await Executor(client, caches).execute(meta, None, Plan(status_patches=[((SCALE, "sums-runner"), STATUS)]))


async def scale_of(objects: NamespaceClient) -> Object:
    """Create an RLJobScale, which no controller changes."""
    metadata = {"name": "sums-runner", "namespace": objects.name, "labels": {JOB: "sums"}}
    spec = {"job": "sums", "role": "runner", "replicas": 1}
    return await objects.create({"apiVersion": "rljob.dev/v1alpha1", "kind": SCALE, "metadata": metadata, "spec": spec})


async def test_a_status_of_another_project_is_changed_as_it_was_observed(
    client: OperatorClient, caches: Caches, objects: NamespaceClient
):
    scale = await scale_of(objects)
    await patch_status(client, caches, scale)
    assert (await objects.get(SCALE, "sums-runner"))["status"] == STATUS


async def test_a_status_is_not_changed_if_the_object_has_changed_since_the_decision(
    client: OperatorClient, caches: Caches, objects: NamespaceClient
):
    scale = await scale_of(objects)
    await objects.patch(SCALE, "sums-runner", {"metadata": {"annotations": {"changed": "meanwhile"}}})
    with pytest.raises(ConflictError):
        await patch_status(client, caches, scale)
    assert "status" not in await objects.get(SCALE, "sums-runner")


async def test_a_status_is_not_changed_if_the_object_is_another_of_the_same_name(
    client: OperatorClient, caches: Caches, objects: NamespaceClient
):
    scale = await scale_of(objects)
    await objects.delete(SCALE, "sums-runner")
    await scale_of(objects)
    with pytest.raises(ConflictError):
        await patch_status(client, caches, scale)
    assert "status" not in await objects.get(SCALE, "sums-runner")


async def test_a_job_that_has_changed_when_its_status_is_written_is_reconciled_again_at_once(
    client: OperatorClient, caches: Caches, objects: NamespaceClient
):
    """The answer to the write has the change, so the cache ignores the event that comes later."""
    unknown = {"nodes": 1, "accelerator": {"profile": "unknown"}}
    created = await objects.create(job(objects.name, "sums", trainer=unknown))
    caches.jobs.put(json.dumps(created).encode())
    await objects.patch("RLJob", "sums", {"spec": {"tracking": {"tensorboard": False}}})
    reconciler = Reconciler(
        client,
        caches,
        Cluster(accelerator="cpu"),
        RLJobPlanner(),
        Recorder(client, Metrics(), "test"),
        LoadSampler(caches.jobs, ignored, time.time),
        clock=itertools.count(0.0, 60.0).__next__,  # no write is delayed to be merged with later changes
    )
    for expected, generation in (("retry", 1), ("done", 2)):
        assert (await reconciler.reconcile((objects.name, "sums"))).what == expected
        assert (await objects.status())["observedGeneration"] == generation
