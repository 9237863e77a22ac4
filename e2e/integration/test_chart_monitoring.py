"""Monitors, alerts, dashboards and the NetworkPolicy of the chart: off by default, valid against their types."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
import yaml

from e2e.integration.chart_goldens import VALUES
from e2e.integration.helm_program import CHART, KUBERNETES, Helm, of_kind
from tools.cluster.controlplane import ControlPlane

CRDS = os.environ.get("RLJOB_THIRD_PARTY_CRDS", "")
NO_CRDS = "RLJOB_THIRD_PARTY_CRDS names no directory with the CustomResourceDefinitions of other projects"
MONITORING = "monitoring.coreos.com/v1"
KINDS = {"servicemonitors": "ServiceMonitor", "podmonitors": "PodMonitor", "prometheusrules": "PrometheusRule"}
ON = ("--values", str(VALUES / "monitoring.yaml"))


def test_by_default_the_chart_needs_no_types_of_others(program: Helm) -> None:
    found = program.template()
    assert not [each for each in found if "monitoring" in each["apiVersion"]]
    assert not {"NetworkPolicy"} & {each["kind"] for each in found}
    assert not [each for each in found if "-dashboard-" in each["metadata"]["name"]]


def test_the_sidecar_of_grafana_finds_three_dashboards(program: Helm) -> None:
    found = [each for each in program.template(*ON) if "-dashboard-" in each["metadata"]["name"]]
    assert [each["metadata"]["labels"]["grafana_dashboard"] for each in found] == ["1"] * 3
    contents = [json.loads(text) for each in found for text in each["data"].values()]
    assert {board["uid"] for board in contents} == {"rljob-fleet", "rljob-job", "rljob-operator"}
    assert len({name for each in found for name in each["data"]}) == 3, "the sidecar writes all files into one folder"


def test_every_alert_has_a_runbook_and_alerts_can_be_left_out(program: Helm) -> None:
    rules = [
        rule for group in of_kind(program.template(*ON), "PrometheusRule")["spec"]["groups"] for rule in group["rules"]
    ]
    names = {rule["alert"] for rule in rules}
    assert "RLJobEnginesIdle" not in names and "RLJobStuck" in names
    runbooks = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in rules}
    assert runbooks["RLJobStuck"] == "https://docs.example.com/rljob/monitoring#rljobstuck"
    written = yaml.safe_load((CHART / "files/alerts.yaml").read_text())
    original = {rule["alert"]: rule for group in written["groups"] for rule in group["rules"]}
    for rule in rules:
        del rule["annotations"]["runbook_url"]
    assert {rule["alert"]: rule for rule in rules} == {name: original[name] for name in names}


def test_the_service_monitor_selects_the_service_of_the_metrics_only(program: Helm) -> None:
    found = program.template(*ON, "--set", "webhook.enabled=true,webhook.certificates=certManager")
    wanted = of_kind(found, "ServiceMonitor")["spec"]["selector"]["matchLabels"].items()
    services = [each for each in found if each["kind"] == "Service" and wanted <= each["metadata"]["labels"].items()]
    assert [each["metadata"]["name"] for each in services] == ["rljob-operator-metrics"]


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (
            "monitoring.rules.enabled=true,monitoring.rules.disabled={RLJobOther}",
            "there is no alert RLJobOther; there are",
        ),
        ("monitoring.serviceMonitor.enabled=true,metrics.service=false", "needs metrics.service: true"),
        (
            "monitoring.podMonitor.interval=often",
            "at '/monitoring/podMonitor/interval': 'often' does not match pattern",
        ),
        (
            "monitoring.podMonitor.components={trainer}",
            "at '/monitoring/podMonitor/components/0': value must be one of",
        ),
        ("monitoring.dashboard.enabled=true", "additional properties 'dashboard' not allowed"),
        ("networkPolicy.apiPorts={none}", "at '/networkPolicy/apiPorts/0': got string, want integer"),
        ("networkPolicy.metricsFrom[0].podLabels.a=b", "additional properties 'podLabels' not allowed"),
        ("acceleratorProfiles.H100.resource=a/b", "'H100' does not match pattern"),
        (
            "acceleratorProfiles.h100.resource=gpu",
            "at '/acceleratorProfiles/h100/resource': 'gpu' does not match pattern",
        ),
        ("acceleratorProfiles.h100.nodes.a=b", "additional properties 'nodes' not allowed"),
    ],
)
def test_a_wrong_value_is_rejected_by_name(program: Helm, value: str, sentence: str) -> None:
    output = program("template", "rljob", str(CHART), "--kube-version", KUBERNETES, "--set", value, code=1)
    assert sentence in output


@pytest.mark.skipif(not CRDS, reason=NO_CRDS)
async def test_the_objects_of_monitoring_are_valid_for_the_prometheus_operator(
    cluster: ControlPlane, namespace: str, program: Helm
) -> None:
    crds = [Path(CRDS) / f"monitoring.coreos.com_{plural}.yaml" for plural in KINDS]
    for crd in crds:
        await asyncio.to_thread(cluster.kubectl, "apply", "--server-side", "-f", str(crd))
    try:
        for plural in KINDS:
            path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{plural}.monitoring.coreos.com"
            await asyncio.to_thread(cluster.api.wait_condition, path, "Established")
        for values in (ON, ("--values", str(VALUES / "namespaces.yaml"))):
            for each in program.template(*values):
                if each["apiVersion"] == MONITORING:
                    each["metadata"]["namespace"] = namespace
                    plural = next(plural for plural, kind in KINDS.items() if kind == each["kind"])
                    path = f"/apis/{MONITORING}/namespaces/{namespace}/{plural}"
                    await asyncio.to_thread(cluster.api.post, path, each, fieldValidation="Strict", dryRun="All")
    finally:
        for crd in crds:
            await asyncio.to_thread(cluster.kubectl, "delete", "--wait=false", "-f", str(crd))


def test_an_install_with_dashboards_and_a_network_policy(cluster: ControlPlane, namespace: str, helm: Helm) -> None:
    values = (
        f"monitoring.dashboards.enabled=true,networkPolicy.enabled=true,monitoring.dashboards.namespace={namespace}"
    )
    helm("install", namespace, str(CHART), "-n", namespace, "--set", values)
    maps = {each["metadata"]["name"] for each in cluster.api.list(cluster.api.path("v1", "ConfigMap", namespace))}
    assert {f"{namespace}-operator-dashboard-{name}" for name in ("fleet", "job", "operator")} <= maps
    policy = cluster.api.get(
        cluster.api.path("networking.k8s.io/v1", "NetworkPolicy", namespace, f"{namespace}-operator")
    )
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    helm("uninstall", namespace, "-n", namespace)
