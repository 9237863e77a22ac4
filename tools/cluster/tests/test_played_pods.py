"""The behaviour of simulated pods, as tools/cluster/pods.py documents it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tools.cluster.client import ApiError, Object
from tools.cluster.controlplane import ControlPlane
from tools.cluster.pods import BEHAVIOUR, EXIT_CODE, MESSAGE

pytestmark = pytest.mark.apiserver
Make = Callable[..., str]


@pytest.fixture
def pod(cluster: ControlPlane, namespace: str) -> Make:
    """Return a function that creates a pod and returns its path."""

    def make(name: str = "one", annotations: Object | None = None, labels: Object | None = None, **spec: Any) -> str:
        metadata = {"name": name, "annotations": annotations or {}, "labels": labels or {}}
        spec = {"containers": [{"name": "main", "image": "none"}], **spec}
        cluster.api.post(f"/api/v1/namespaces/{namespace}/pods", {"metadata": metadata, "spec": spec})
        return f"/api/v1/namespaces/{namespace}/pods/{name}"

    return make


def container(found: Object) -> Object:
    status: Object = found["status"]["containerStatuses"][0]
    return status


def test_a_pod_is_placed_and_ready_within_seconds(cluster: ControlPlane, pod: Make):
    found = cluster.api.wait_condition(pod(), "Ready", seconds=60)
    assert found["spec"]["nodeName"].startswith("node-")
    assert found["status"]["phase"] == "Running"
    assert found["status"]["podIP"]
    assert container(found)["ready"]


def test_a_pod_that_requests_too_many_gpus_stays_pending_with_the_cause(cluster: ControlPlane, pod: Make):
    greedy = {"name": "main", "image": "none", "resources": {"limits": {"nvidia.com/gpu": "99"}}}
    found = cluster.api.wait_condition(pod(containers=[greedy]), "PodScheduled", "False")
    assert "Insufficient nvidia.com/gpu" in found["status"]["conditions"][0]["message"]


def test_the_readiness_of_a_pod_follows_its_annotation(cluster: ControlPlane, namespace: str, pod: Make):
    path = pod(annotations={BEHAVIOUR: "never-ready"})
    found = cluster.api.wait_condition(path, "Ready", "False")
    assert found["status"]["phase"] == "Running"
    cluster.pods.behave(namespace, "one", None)
    cluster.api.wait_condition(path, "Ready")
    cluster.pods.behave(namespace, "one", "never-ready")
    assert not container(cluster.api.wait_condition(path, "Ready", "False"))["ready"]


def test_an_image_pull_backoff_is_reported_until_the_annotation_is_removed(
    cluster: ControlPlane, namespace: str, pod: Make
):
    path = pod(annotations={BEHAVIOUR: "image-pull-backoff"})
    found = cluster.api.wait_condition(path, "ContainersReady", "False")
    assert container(found)["state"]["waiting"] == {
        "reason": "ImagePullBackOff",
        "message": 'Back-off pulling image "none"',
    }
    assert found["status"]["phase"] == "Pending"
    cluster.pods.behave(namespace, "one", None)
    cluster.api.wait_condition(path, "Ready")


@pytest.mark.parametrize(("code", "phase"), [(0, "Succeeded"), (2, "Failed")])
def test_a_pod_exits_with_the_requested_code(cluster: ControlPlane, namespace: str, pod: Make, code: int, phase: str):
    path = pod(restartPolicy="Never")
    cluster.api.wait_condition(path, "Ready")
    cluster.pods.exit(namespace, "one", code, "bad lr")
    found = cluster.api.wait_condition(path, "Ready", "False")
    assert found["status"]["phase"] == phase
    assert (state := container(found)["state"]["terminated"])["exitCode"] == code
    assert state["message"] == "bad lr"


def test_a_pod_that_is_always_restarted_stays_in_crash_loop_until_it_recovers(
    cluster: ControlPlane, namespace: str, pod: Make
):
    path = pod(annotations={EXIT_CODE: "3", MESSAGE: "no"})
    found = cluster.api.wait_condition(path, "Ready", "False")
    assert found["status"]["phase"] == "Running"
    assert container(found)["state"]["waiting"]["reason"] == "CrashLoopBackOff"
    assert container(found)["lastState"]["terminated"]["exitCode"] == 3
    cluster.pods.recover(namespace, "one")
    found = cluster.api.wait_condition(path, "Ready")
    assert container(found)["restartCount"] == 1
    assert container(found)["lastState"]["terminated"]["message"] == "no"


def test_a_container_runs_again_after_a_restart(cluster: ControlPlane, namespace: str, pod: Make):
    path = pod()
    cluster.api.wait_condition(path, "Ready")
    for count in (1, 2):
        found = cluster.pods.restart(namespace, "one", 7, "out of memory")
        assert container(found)["restartCount"] == count
    assert container(found)["lastState"]["terminated"]["exitCode"] == 7
    cluster.api.wait_condition(path, "Ready")


def test_a_lingering_pod_is_deleted_when_its_annotation_is_removed(cluster: ControlPlane, namespace: str, pod: Make):
    path = pod(annotations={BEHAVIOUR: "lingering"})
    cluster.api.wait_condition(path, "Ready")
    cluster.api.delete(path)
    assert cluster.api.get(path)["metadata"]["deletionTimestamp"]
    cluster.pods.behave(namespace, "one", None)
    cluster.api.wait_gone(path)


def test_the_pod_of_an_initializer_completes_by_itself(cluster: ControlPlane, pod: Make):
    path = pod(labels={"app.kubernetes.io/component": "initializer"}, restartPolicy="Never")
    cluster.api.wait_for(lambda: cluster.api.get(path)["status"]["phase"] == "Succeeded", what="completion")


def job(annotations: Object, **spec: Any) -> Object:
    pods = {"restartPolicy": "Never", "containers": [{"name": "main", "image": "none"}]}
    template = {"metadata": {"annotations": annotations}, "spec": pods}
    return {"metadata": {"name": "train"}, "spec": {"template": template, "backoffLimit": 0, **spec}}


@pytest.mark.parametrize(("code", "condition"), [("0", "Complete"), ("1", "Failed")])
def test_the_condition_of_a_job_follows_the_exit_of_its_pods(
    cluster: ControlPlane, namespace: str, code: str, condition: str
):
    jobs = f"/apis/batch/v1/namespaces/{namespace}/jobs"
    cluster.api.post(jobs, job({EXIT_CODE: code}))
    cluster.api.wait_condition(f"{jobs}/train", condition)


def test_a_job_whose_pod_is_evicted_fails_by_its_rule_for_disruptions(cluster: ControlPlane, namespace: str):
    rule = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    jobs = f"/apis/batch/v1/namespaces/{namespace}/jobs"
    cluster.api.post(jobs, job({}, podFailurePolicy={"rules": [rule]}))
    [name] = cluster.api.wait_for(lambda: ready(cluster, namespace))
    cluster.pods.evict(namespace, name)
    found = cluster.api.wait_condition(f"{jobs}/train", "Failed")
    failed = next(c for c in found["status"]["conditions"] if c["type"] == "Failed")
    assert failed["reason"] == "PodFailurePolicy"
    assert "DisruptionTarget" in failed["message"]


def test_the_replicas_of_a_deployment_become_available_and_a_budget_protects_them(
    cluster: ControlPlane, namespace: str
):
    labels = {"app": "web"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "main", "image": "none"}]}}
    spec = {"replicas": 2, "selector": {"matchLabels": labels}, "template": template}
    deployments = f"/apis/apps/v1/namespaces/{namespace}/deployments"
    cluster.api.post(deployments, {"metadata": {"name": "web"}, "spec": spec})
    budgets = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"
    budget = {"metadata": {"name": "web"}, "spec": {"selector": {"matchLabels": labels}, "minAvailable": 2}}
    cluster.api.post(budgets, budget)
    cluster.api.wait_condition(f"{deployments}/web", "Available")
    cluster.api.wait_for(lambda: cluster.api.get(f"{budgets}/web")["status"].get("currentHealthy") == 2)
    with pytest.raises(ApiError, match="disruption budget"):
        cluster.pods.evict(namespace, ready(cluster, namespace)[0])


@pytest.mark.parametrize(("storage_class", "phase"), [(None, "Bound"), ("no-such-class", "Pending")])
def test_a_claim_is_bound_if_its_class_exists(
    cluster: ControlPlane, namespace: str, storage_class: str | None, phase: str
):
    claims = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims"
    spec: Object = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    if storage_class:
        spec["storageClassName"] = storage_class
    cluster.api.post(claims, {"metadata": {"name": "storage"}, "spec": spec})
    cluster.api.wait_for(lambda: cluster.api.get(f"{claims}/storage")["status"].get("phase") == phase, what=phase)


def ready(cluster: ControlPlane, namespace: str) -> list[str]:
    """Return the names of the pods that are Ready."""
    return [
        pod["metadata"]["name"]
        for pod in cluster.api.list(f"/api/v1/namespaces/{namespace}/pods")
        if any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))
    ]
