"""What the chart sets for pods: the policy that narrows the operator's right to patch them, users, additions."""

from __future__ import annotations

import itertools

import pytest

from e2e.integration.helm_program import CHART, Helm, of_kind
from rljob.api.yaml_loader import read_yaml
from rljob.operator.config import read_settings
from tools.cluster.client import ApiError

COST = "controller.kubernetes.io/pod-deletion-cost"


def operator_pod(found: list[dict]) -> dict:
    return of_kind(found, "Deployment")["spec"]["template"]["spec"]


def test_the_operator_changes_only_the_deletion_cost_of_a_pod(cluster, namespace, helm: Helm):
    helm("install", namespace, str(CHART), "-n", namespace)
    try:
        account = f"{namespace}-operator"
        operator = cluster.client(cluster.service_account_token(namespace, account))
        spec = {"containers": [{"name": "main", "image": "one:1"}], "nodeName": "nowhere"}
        meta = {"name": "pod", "namespace": namespace, "annotations": {"mine": "1"}, "labels": {"app": "a"}}
        cluster.api.create({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
        path = cluster.api.path("v1", "Pod", namespace, "pod")
        cluster.wait_allowed(f"{namespace}:{account}", namespace, "patch", "pods", "")
        refused = [
            {"spec": {"containers": [{"name": "main", "image": "other:1"}]}},
            {"metadata": {"labels": {"app": "b"}}},
            {"metadata": {"annotations": {"mine": "2"}}},
            {"metadata": {"annotations": {"mine": None}}},
            {"metadata": {"annotations": {"other": "1", COST: "5"}}},
            {"metadata": {"finalizers": ["acme.example/keep"]}},
        ]

        attempts = itertools.count()

        def enforced() -> bool:
            try:
                operator.patch(path, {"metadata": {"labels": {"attempt": str(next(attempts))}}})
            except ApiError as error:
                return "changes nothing of a pod" in error.message
            return False

        cluster.api.wait_for(enforced, what="the policy to be read")
        for body in refused:
            with pytest.raises(ApiError, match="changes nothing of a pod but the annotation") as refusal:
                operator.patch(path, body, "strategic")
            assert refusal.value.code == 403
        for cost in ("-5", "7", None):
            found = operator.patch(path, {"metadata": {"annotations": {COST: cost}}})
            assert found["metadata"]["annotations"].get(COST) == cost
        cluster.api.patch(path, {"metadata": {"labels": {"app": "c"}}})  # others are not restricted
    finally:
        helm("uninstall", namespace, "-n", namespace)


def test_the_policy_can_be_left_out(program: Helm):
    assert [each for each in program.template() if each["metadata"]["name"].endswith(".pods.rljob.dev")]
    found = program.template("--set", "podPolicy.enabled=false")
    assert not [each for each in found if each["metadata"]["name"].endswith(".pods.rljob.dev")]


@pytest.mark.parametrize("user", [None, 1001])
def test_the_user_is_that_of_operator_and_jobs_or_of_the_cluster(program: Helm, tmp_path, user):
    found = program.template("--set", f"podSecurity.user={'null' if user is None else user}")
    context = operator_pod(found)["securityContext"]
    assert (context.get("runAsUser"), context.get("runAsGroup")) == (user, user)
    assert context["runAsNonRoot"] is True
    path = tmp_path / "operator.json"
    path.write_text(of_kind(found, "ConfigMap")["data"]["operator.json"])
    assert read_settings(path).for_rendering().user == user


def test_additions_are_in_the_operators_pod(program: Helm, tmp_path):
    values = tmp_path / "values.yaml"
    values.write_text(
        "extraEnv: [{name: HTTPS_PROXY, value: 'http://proxy:1'}]\n"
        "extraVolumes: [{name: ca, configMap: {name: ca}}]\n"
        "extraVolumeMounts: [{name: ca, mountPath: /etc/ca}]\n"
        "extraArgs: [--verbose]\n"
        "jobs: {allowFrom: [{name: prometheus, namespaceLabels: {name: monitoring}}]}\n"
    )
    found = program.template("--values", str(values))
    pod = operator_pod(found)
    (container,) = pod["containers"]
    assert {"name": "HTTPS_PROXY", "value": "http://proxy:1"} in container["env"]
    assert {"name": "ca", "configMap": {"name": "ca"}} in pod["volumes"]
    assert {"name": "ca", "mountPath": "/etc/ca"} in container["volumeMounts"]
    assert container["args"][-1] == "--verbose"
    path = tmp_path / "operator.json"
    path.write_text(of_kind(found, "ConfigMap")["data"]["operator.json"])
    (peer,) = read_settings(path).for_rendering().allow_from
    assert (peer.name, peer.namespace_labels) == ("prometheus", {"name": "monitoring"})


@pytest.mark.parametrize("path", sorted((CHART / "profiles").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_operator_reads_the_accelerator_profiles_that_the_chart_ships(program: Helm, tmp_path, path):
    settings = tmp_path / "operator.json"
    settings.write_text(of_kind(program.template("--values", str(path)), "ConfigMap")["data"]["operator.json"])
    written = read_yaml(path.read_text())["acceleratorProfiles"]
    assert read_settings(settings).for_rendering().accelerator_profiles.keys() == written.keys()
