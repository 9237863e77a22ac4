"""The chart's ValidatingAdmissionPolicy decides who may write which part of a status: on a real API server."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from core.tests.crd_cases import changed
from rljob.manifests.names import object_name
from tools.cluster import build
from tools.cluster.client import ApiError

CHART = Path(__file__).parents[2] / "charts" / "rljob"
API = "rljob.dev/v1alpha1"
HEADER = {"apiVersion": API, "kind": "RLJob"}
LONG = "a-job-with-a-name-that-is-cut-in-the-names--of-its-objects"
RUN = {"state": "Running", "progress": {"step": 3}}


@pytest.fixture
def policy(cluster, namespace) -> Iterator[None]:
    """The policy, for this namespace; the operator's account is its `rljob-operator`."""
    command = [str(build.ensure("helm") / "helm"), "template", "rljob", str(CHART), "-n", namespace]
    command += ["--set", f"watchNamespaces={{{namespace}}}", "--show-only", "templates/status-policy.yaml"]
    environment = os.environ | {"KUBECONFIG": "/dev/null"}
    text = subprocess.run(
        [*command, "--kube-version", "1.36.0"], check=True, capture_output=True, text=True, env=environment
    ).stdout
    objects = list(yaml.safe_load_all(text))
    for found in objects:
        cluster.api.apply_object(found)
    path = cluster.api.path(API, "RLJob", namespace)
    cluster.api.post(path, changed(("metadata.name=probe",)))
    stranger = account(cluster, namespace, "probe")
    # The API server loads a policy with a delay.
    cluster.api.wait_for(lambda: rejection(stranger, f"{path}/probe", {"run": RUN}), what="the policy to be in force")
    yield
    for found in objects:
        cluster.api.delete(cluster.api.path(found["apiVersion"], found["kind"], None, found["metadata"]["name"]))


def account(cluster, namespace, name):
    """Return a client of a service account that RBAC allows to write any status."""
    client = cluster.client(cluster.service_account_token(namespace, name))
    rbac = "rbac.authorization.k8s.io"
    rules = [{"apiGroups": ["rljob.dev"], "resources": ["rljobs", "rljobs/status"], "verbs": ["*"]}]
    kinds = {"apiVersion": f"{rbac}/v1", "metadata": {"name": name, "namespace": namespace}}
    cluster.api.apply_object({**kinds, "kind": "Role", "rules": rules})
    subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    role = {"apiGroup": rbac, "kind": "Role", "name": name}
    cluster.api.apply_object({**kinds, "kind": "RoleBinding", "roleRef": role, "subjects": [subject]})
    # Otherwise a request could be rejected by RBAC while a test waits for the rejection by the policy.
    cluster.wait_allowed(f"{namespace}:{name}", namespace, "patch", "rljobs/status", "rljob.dev")
    return client


def rejection(client, path, status, manager="test"):
    """Apply ``status`` to the job at ``path``; return the message of the rejection, or an empty string."""
    body = HEADER | {"metadata": {"name": path.rpartition("/")[2]}, "status": status}
    try:
        client.apply(f"{path}/status", body, manager)
    except ApiError as error:
        assert error.code == 403, error
        return error.message
    return ""


@pytest.fixture(params=["sums", LONG], ids=["short", "long"])
def job(request, cluster, namespace, policy):
    """Path of a job with a status that the operator wrote."""
    cluster.api.post(cluster.api.path(API, "RLJob", namespace), changed((f"metadata.name={request.param}",)))
    path = cluster.api.path(API, "RLJob", namespace, request.param)
    operator = account(cluster, namespace, "rljob-operator")
    assert rejection(operator, path, {"observedGeneration": 1, "release": "1"}, "rljob-operator") == ""
    return path


def coordinator(cluster, namespace, job):
    return account(cluster, namespace, object_name(job.rpartition("/")[2], "coordinator"))


def test_the_coordinator_of_a_job_writes_its_run_and_nothing_else(cluster, namespace, job):
    client = coordinator(cluster, namespace, job)
    assert rejection(client, job, {"run": RUN}, "rljob-coordinator") == ""
    status = cluster.api.get(job)["status"]
    assert status["run"]["progress"] == {"step": 3}
    assert status["release"] == "1"
    message = "a coordinator writes status.run and nothing else of the status"
    assert message in rejection(client, job, {"run": RUN, "release": "2"}, "rljob-coordinator")
    assert message in rejection(
        client, job, {"run": RUN, "completionTime": "2026-01-01T00:00:00Z"}, "rljob-coordinator"
    )
    stored = cluster.api.get(job)
    del stored["status"]["release"]
    with pytest.raises(ApiError, match=message):
        client.put(f"{job}/status", stored)


def test_the_operator_writes_all_of_a_status(cluster, namespace, job):
    operator = account(cluster, namespace, "rljob-operator")
    assert rejection(operator, job, {"release": "3", "run": RUN}, "rljob-operator") == ""
    assert cluster.api.get(job)["status"]["release"] == "3"


@pytest.mark.parametrize("name", ["other-coordinator", "default", "sums-coordinator-x", "sums", "rljob-operator-2"])
def test_no_other_service_account_may_write_the_status(cluster, namespace, job, name):
    message = rejection(account(cluster, namespace, name), job, {"run": RUN})
    assert "status.run by the coordinator of the job" in message
    assert f"system:serviceaccount:{namespace}:{name} is neither" in message


def test_the_coordinator_of_a_job_of_the_same_name_in_another_namespace_is_rejected(cluster, namespace, job):
    other = cluster.namespace()
    name = object_name(job.rpartition("/")[2], "coordinator")
    client = cluster.client(cluster.service_account_token(other, name))
    rbac = "rbac.authorization.k8s.io"
    coordinator(cluster, namespace, job)
    cluster.api.apply_object(
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": {"name": "elsewhere", "namespace": namespace},
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": other}],
        }
    )
    cluster.wait_allowed(f"{other}:{name}", namespace, "patch", "rljobs/status", "rljob.dev")
    try:
        assert "is neither" in rejection(client, job, {"run": RUN})
    finally:
        cluster.api.delete(f"/api/v1/namespaces/{other}")


def test_users_may_write_the_status(cluster, job):
    assert rejection(cluster.api, job, {"release": "by hand"}) == ""
