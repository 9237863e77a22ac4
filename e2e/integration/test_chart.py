"""The chart of the operator: installed objects, rights, and rejected values."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import yaml

from e2e.integration.helm_program import CHART, KUBERNETES, Helm, of_kind
from rljob.operator.config import read_settings
from rljob.operator.object_kinds import BY_KEY, NATIVE_POD_GROUPS
from tools.cluster.client import ApiError
from tools.cluster.controlplane import ControlPlane

READ = ("get", "list", "watch")


@pytest.fixture
def release(cluster: ControlPlane, namespace: str, helm: Helm) -> Iterator[str]:
    """A release with the name of its namespace; yields the operator's name. It is uninstalled after the test."""
    helm("install", namespace, str(CHART), "-n", namespace)
    yield f"{namespace}-operator"
    helm("uninstall", namespace, "-n", namespace, "--ignore-not-found")


def job(name: str) -> dict:
    return {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": name},
        "spec": {
            "models": [{"name": "policy", "source": "job://model"}],
            "training": {"steps": 1},
            "tasks": [{"name": "sums", "data": {"reasoningGym": {"dataset": "chain_sum"}}, "reward": "sums"}],
            "rewards": [{"name": "sums", "builtin": "reasoning_gym"}],
            "rollouts": [{"name": "main"}],
        },
    }


# --- rendering -------------------------------------------------------------------------------------------------------


def test_the_chart_passes_helms_own_checks(program):
    assert "0 chart(s) failed" in program("lint", "--strict", str(CHART), "--kube-version", KUBERNETES)


def test_the_operator_reads_the_settings_that_the_chart_writes(program, tmp_path):
    values = (
        "images.registry=registry.example.com/team,images.tag=1.2,images.trainer=localhost:5000/mine@sha256:0,"
        "images.rollout=other.example.com/rollout,images.runner=own/runner:3,images.pullSecrets={pull},"
        "jobs.storage.className=fast,jobs.storage.size=2Ti,jobs.accelerator=cpu,workers=4,leaseSeconds=5,"
        "watchNamespaces={a,b},logLevel=DEBUG,clusterDomain=example.org,jobs.requestsPerGPU.memory=64Gi"
    )
    config = of_kind(program.template("--set", values), "ConfigMap")
    path = tmp_path / "operator.json"
    path.write_text(config["data"]["operator.json"])
    settings = read_settings(path)
    assert settings.for_rendering().images == {
        "coordinator": "registry.example.com/team/rljob-coordinator:1.2",
        "runner": "registry.example.com/team/own/runner:3",
        "trainer": "localhost:5000/mine@sha256:0",
        "rollout": "other.example.com/rollout:1.2",
        "rewards": "registry.example.com/team/rljob-rewards:1.2",
        "environments": "registry.example.com/team/rljob-environments:1.2",
    }
    assert settings.for_rendering().image_pull_secrets == ("pull",)
    assert (settings.cluster.storage_class, settings.cluster.storage_size) == ("fast", "2Ti")
    assert settings.cluster.accelerator == "cpu"
    assert settings.for_rendering().requests_per_gpu == {"cpu": "2", "memory": "64Gi"}
    assert settings.cluster.domain == "example.org"
    assert (settings.workers, settings.namespaces, settings.log_level) == (4, ["a", "b"], "DEBUG")
    assert settings.lease.duration_seconds == 5


def test_kopf_listens_on_loopback_and_gets_the_log_format_and_further_handlers(program):
    def container(*values: str) -> dict:
        return of_kind(program.template(*values), "Deployment")["spec"]["template"]["spec"]["containers"][0]

    assert container()["args"] == ["--liveness=http://127.0.0.1:8081/healthz", "--log-format=full"]
    found = container("--set", "metrics.port=8081,logFormat=json,handlers={acme.hooks,more}")
    assert found["args"] == [
        "--liveness=http://127.0.0.1:8082/healthz",
        "--log-format=json",
        "--module=acme.hooks",
        "--module=more",
    ]
    assert found["ports"] == [{"name": "http", "containerPort": 8081}]
    assert found["livenessProbe"]["httpGet"] == found["startupProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}


def test_a_change_of_the_settings_replaces_the_operators_pods(program):
    def template(*values: str) -> dict:
        return of_kind(program.template(*values), "Deployment")["spec"]["template"]

    assert template() == template("--set", "replicas=3")
    assert template() != template("--set", "workers=3")


def test_with_a_list_of_namespaces_the_operator_has_no_rights_elsewhere(program):
    found = program.template("--set", "watchNamespaces={a,b}")
    assert not [o for o in found if o["kind"] == "ClusterRoleBinding"]
    bound = {o["metadata"]["namespace"] for o in found if o["kind"] == "RoleBinding"}
    assert bound == {"a", "b", "rljob-system"}


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("replicas=none", "at '/replicas': got string, want integer"),
        ("jobs.accelerator=tpu", "at '/jobs/accelerator': value must be one of 'nvidia', 'cpu'"),
        ("image.tag=3", "additional properties 'image' not allowed"),
        ("jobs.storage.size=much", "at '/jobs/storage/size': 'much' does not match pattern"),
        ("watchNamespaces=a", "at '/watchNamespaces': got string, want array"),
        ("images.trainer=null", "missing property 'trainer'"),
        ("images.trainer=UPPER", "at '/images/trainer': 'UPPER' does not match pattern"),
        ("images.registry=https://registry.example.com", "at '/images/registry'"),
        ("serviceAccount.name=Bad Name", "at '/serviceAccount/name': 'Bad Name' does not match pattern"),
        ("logLevel=LOUD", "at '/logLevel': value must be one of 'DEBUG', 'INFO', 'WARNING', 'ERROR'"),
    ],
)
def test_a_wrong_value_is_rejected_by_name(program, value, sentence):
    output = program("template", "rljob", str(CHART), "--kube-version", KUBERNETES, "--set", value, code=1)
    assert sentence in output


def test_every_value_is_in_the_schema():
    def compare(values, schema, path="") -> None:
        for key, value in values.items():
            assert key in schema["properties"], f"{path}.{key}"
            if schema["properties"][key].get("properties"):
                compare(value, schema["properties"][key], f"{path}.{key}")

    compare(yaml.safe_load((CHART / "values.yaml").read_text()), json.loads((CHART / "values.schema.json").read_text()))


# --- on a cluster -----------------------------------------------------------------------------------------------------


def test_the_two_operator_pods_meet_the_restricted_standard(cluster, release, namespace):
    level = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    cluster.api.patch(f"/api/v1/namespaces/{namespace}", level)
    deployment = cluster.api.path("apps/v1", "Deployment", namespace, release)
    cluster.api.patch(deployment, {"spec": {"template": {"metadata": {"annotations": {"again": "1"}}}}})

    def updated() -> bool:
        status = cluster.api.get(deployment)["status"]
        return status.get("updatedReplicas") == status.get("readyReplicas") == 2 and not status.get(
            "unavailableReplicas"
        )

    cluster.api.wait_for(updated, what="two operators under the restricted standard")


def test_an_upgrade_and_an_uninstall_keep_rljobs(cluster, release, namespace, helm):
    jobs = cluster.api.path("rljob.dev/v1alpha1", "RLJob", namespace)
    uid = cluster.api.post(jobs, job("kept"))["metadata"]["uid"]
    helm("upgrade", namespace, str(CHART), "-n", namespace, "--set", "replicas=1")
    assert cluster.api.get(cluster.api.path("apps/v1", "Deployment", namespace, release))["spec"]["replicas"] == 1
    assert cluster.api.get(f"{jobs}/kept")["metadata"]["uid"] == uid
    helm("uninstall", namespace, "-n", namespace)
    assert not cluster.api.exists(cluster.api.path("apps/v1", "Deployment", namespace, release))
    assert cluster.api.get(f"{jobs}/kept")["metadata"]["uid"] == uid


def test_a_second_release_for_the_same_namespaces_is_refused(cluster, release, namespace, helm):
    other = cluster.namespace()
    for values in ((), ("--set", f"watchNamespaces={{{other}}}")):
        output = helm("install", "second", str(CHART), "-n", other, *values, code=1)
        assert f"the release {namespace}/{namespace} serves the RLJobs of all namespaces already" in output
    assert not cluster.api.exists(cluster.api.path("apps/v1", "Deployment", other, "second-operator"))
    cluster.api.delete(f"/api/v1/namespaces/{other}")


def test_releases_with_different_namespaces_do_not_conflict(cluster, helm):
    one, other = cluster.namespace(), cluster.namespace()
    helm("install", "first", str(CHART), "-n", one, "--set", f"watchNamespaces={{{one}}}")
    helm("install", "second", str(CHART), "-n", other, "--set", f"watchNamespaces={{{other}}}")
    output = helm("upgrade", "second", str(CHART), "-n", other, "--set", f"watchNamespaces={{{other},{one}}}", code=1)
    assert f"the release {one}/first serves the RLJobs of {one} already" in output
    output = helm("upgrade", "second", str(CHART), "-n", other, "--reset-values", code=1)
    assert f"the release {one}/first serves the RLJobs of {one} already" in output
    for name, where in (("first", one), ("second", other)):
        helm("uninstall", name, "-n", where)
        cluster.api.delete(f"/api/v1/namespaces/{where}")


# --- rights -----------------------------------------------------------------------------------------------------------


def needed() -> Iterator[tuple[str, str, str]]:
    """Yield verb, resource and group of every request of the operator in a job's namespace."""
    yield from ((verb, "rljobs", "rljob.dev") for verb in (*READ, "delete"))
    yield ("patch", "rljobs/status", "rljob.dev")
    yield ("update", "rljobs/finalizers", "rljob.dev")
    yield ("patch", "rljobscales/status", "rljob.dev")
    yield from ((verb, "pods", "") for verb in (*READ, "patch", "delete"))
    yield ("patch", "workloads/status", "kueue.x-k8s.io")
    yield from ((verb, kind.plural, kind.group) for kind in BY_KEY.values() for verb in (*READ, "create"))
    yield from (("patch", kind.plural, kind.group) for kind in BY_KEY.values() if kind is not NATIVE_POD_GROUPS)
    yield from (
        ("delete", kind.plural, kind.group) for kind in BY_KEY.values() if kind.plural != "persistentvolumeclaims"
    )
    yield ("create", "secrets", "")
    yield from ((verb, "events", "") for verb in ("get", "list", "create", "patch"))


CLUSTER_WIDE = [("get", "resourceflavors", "kueue.x-k8s.io"), ("get", "priorityclasses", "scheduling.k8s.io")]
"""Rights for objects without a namespace, which jobs in Kueue need."""
FORBIDDEN = [
    *((verb, "podgroups", "scheduling.k8s.io") for verb in ("update", "patch")),
    *((verb, *kind) for _, *kind in CLUSTER_WIDE for verb in ("list", "watch", "create", "update", "patch", "delete")),
    *((verb, "workloads/status", "kueue.x-k8s.io") for verb in ("get", "update")),
    *((verb, "clusterqueues", "kueue.x-k8s.io") for verb in (*READ, "create", "patch")),
    *((verb, "localqueues", "kueue.x-k8s.io") for verb in (*READ, "create", "patch")),
    *((verb, "secrets", "") for verb in (*READ, "update", "patch", "delete", "deletecollection")),
    *((verb, "rljobs", "rljob.dev") for verb in ("create", "update", "patch", "deletecollection")),
    *((verb, "pods", "") for verb in ("create", "update", "deletecollection")),
    *((verb, "rayclusters", "ray.io") for verb in ("update", "deletecollection")),
    ("patch", "rayclusters/status", "ray.io"),
    ("create", "pods/exec", ""),
    ("get", "pods/log", ""),
    ("delete", "persistentvolumeclaims", ""),
    ("create", "serviceaccounts/token", ""),
    *((verb, "nodes", "") for verb in READ),
    *((verb, "namespaces", "") for verb in (*READ, "create")),
    *((verb, "leases", "coordination.k8s.io") for verb in (*READ, "create", "update")),
    *((verb, "clusterroles", "rbac.authorization.k8s.io") for verb in ("create", "bind", "escalate")),
    *((verb, "roles", "rbac.authorization.k8s.io") for verb in ("bind", "escalate")),
    ("impersonate", "users", ""),
    ("get", "customresourcedefinitions", "apiextensions.k8s.io"),
]


def test_the_operator_may_do_all_that_it_does_in_any_namespace(cluster, release, namespace):
    for right in (*needed(), *CLUSTER_WIDE):
        cluster.wait_allowed(f"{namespace}:{release}", "default", *right)


def test_the_operator_has_no_other_rights(cluster, release, namespace):
    user = f"{namespace}:{release}"
    cluster.wait_allowed(user, "default", "create", "secrets", "")
    assert not [right for right in FORBIDDEN if cluster.allowed(user, "default", *right)]


def test_the_operator_may_access_only_its_own_lease(cluster, release, namespace):
    def may(verb: str, name: str) -> bool:
        return cluster.allowed(f"{namespace}:{release}", namespace, verb, "leases", "coordination.k8s.io", name)

    cluster.wait_allowed(f"{namespace}:{release}", namespace, "create", "leases", "coordination.k8s.io")
    assert may("create", "") and may("get", release) and may("update", release)
    assert not may("get", "another") and not may("update", "another") and not may("delete", release)


def test_the_operator_cannot_grant_what_it_does_not_hold(cluster, release, namespace):
    operator = cluster.client(cluster.service_account_token(namespace, release))
    roles = cluster.api.path("rbac.authorization.k8s.io/v1", "Role", namespace)
    cluster.wait_allowed(f"{namespace}:{release}", namespace, "create", "roles", "rbac.authorization.k8s.io")
    own = {"apiGroups": ["rljob.dev"], "resources": ["rljobs/status"], "resourceNames": ["sums"], "verbs": ["patch"]}
    operator.post(roles, {"metadata": {"name": "coordinator"}, "rules": [own]})
    more = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}
    with pytest.raises(ApiError, match="attempting to grant RBAC permissions not currently held"):
        operator.post(roles, {"metadata": {"name": "more"}, "rules": [more]})


def test_the_api_server_grants_no_rights_outside_the_listed_namespaces(cluster, namespace, helm):
    helm("install", "one", str(CHART), "-n", namespace, "--set", f"watchNamespaces={{{namespace}}}")
    user = f"{namespace}:one-operator"
    for right in needed():
        cluster.wait_allowed(user, namespace, *right)
    assert not [right for right in (*needed(), *CLUSTER_WIDE) if cluster.allowed(user, "default", *right)]
    helm("uninstall", "one", "-n", namespace)


@pytest.mark.parametrize(
    ("role", "may", "may_not"),
    [
        ("view", READ, ("create", "update", "patch", "delete")),
        ("edit", (*READ, "create", "update", "patch", "delete"), ()),
    ],
)
def test_the_roles_view_and_edit_of_a_namespace_include_its_rljobs(cluster, release, namespace, role, may, may_not):
    bindings = cluster.api.path("rbac.authorization.k8s.io/v1", "RoleBinding", namespace)
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role}
    subjects = [{"kind": "ServiceAccount", "name": "person", "namespace": namespace}]
    cluster.api.post(bindings, {"metadata": {"name": "person"}, "roleRef": reference, "subjects": subjects})

    def has(verb: str) -> bool:
        return cluster.allowed(f"{namespace}:person", namespace, verb, "rljobs", "rljob.dev")

    cluster.api.wait_for(lambda: all(map(has, may)), what=f"{role} to be extended")  # a controller aggregates it
    assert not [verb for verb in may_not if has(verb)]
    assert not cluster.allowed(f"{namespace}:person", namespace, "patch", "rljobs/status", "rljob.dev")
    assert cluster.allowed(f"{namespace}:person", namespace, "update", "rljobscales/scale", "rljob.dev") == (
        role == "edit"
    )
