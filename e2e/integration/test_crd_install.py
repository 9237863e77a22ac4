"""The CRDs can be installed with kubectl and with helm, and the API server accepts the examples unchanged."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from core.tests.manifests import MANIFEST
from rljob.api.crd import definitions
from tools.cluster import build
from tools.cluster.client import ApiError

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "rljob-crds"
API = "rljob.dev/v1alpha1"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def helm(cluster, *arguments):
    program = str(build.ensure("helm") / "helm")
    environment = os.environ | {"KUBECONFIG": str(cluster.kubeconfig), "HOME": str(cluster.directory)}
    done = subprocess.run([program, *arguments], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", definitions())
def test_kubectl_installs_a_definition_by_create_and_by_server_side_apply(cluster, name):
    path = str(ROOT / "crds" / f"rljob.dev_{name}.yaml")
    with pytest.raises(RuntimeError, match="already exists"):  # the definition is valid
        cluster.kubectl("create", "--dry-run=server", "-f", path)
    applied = cluster.kubectl("apply", "--server-side", "--force-conflicts", "--dry-run=server", "-f", path)
    assert "serverside-applied" in applied


@pytest.mark.parametrize("name", definitions())
def test_the_api_server_stores_the_definition_as_generated(cluster, name):
    stored = cluster.api.get(f"{DEFINITIONS}/{name}.rljob.dev")
    expected = definitions()[name]["spec"]
    version = stored["spec"]["versions"][0]
    assert version["schema"] == expected["versions"][0]["schema"]
    assert version["additionalPrinterColumns"] == expected["versions"][0]["additionalPrinterColumns"]
    conditions = {condition["type"]: condition for condition in stored["status"]["conditions"]}
    assert conditions["Established"]["status"] == "True"
    assert "NonStructuralSchema" not in conditions


def test_the_chart_passes_helms_own_checks(cluster):
    assert "0 chart(s) failed" in helm(cluster, "lint", "--strict", str(CHART), "--kube-version", "1.36.0")


def test_helm_installs_and_upgrades_the_definitions_and_an_uninstall_keeps_them(cluster, namespace):
    job = cluster.api.path(API, "RLJob", namespace)
    cluster.api.post(job, MANIFEST)
    helm(cluster, "install", "crds", str(CHART), "-n", namespace, "--take-ownership")
    helm(cluster, "upgrade", "crds", str(CHART), "-n", namespace)
    helm(cluster, "uninstall", "crds", "-n", namespace)
    assert cluster.api.exists(f"{DEFINITIONS}/rljobs.rljob.dev")
    assert cluster.api.exists(f"{job}/{MANIFEST['metadata']['name']}")
    assert cluster.api.get(f"{DEFINITIONS}/rljobs.rljob.dev")["metadata"].get("deletionTimestamp") is None


def test_the_quickstart_is_accepted_unchanged(cluster, namespace):
    path = str(ROOT / "examples" / "quickstart.yaml")
    assert "created" in cluster.kubectl("create", "-n", namespace, "--dry-run=server", "-f", path)


def sample(schema, field=""):
    """Return a value that a schema allows, with every field set."""
    if "enum" in schema:
        return schema["enum"][0]
    if schema["type"] == "object":
        return {name: sample(inner, name) for name, inner in schema["properties"].items()}
    if schema["type"] == "array":
        return [sample(schema["items"])]
    if schema.get("format") == "date-time":
        return "2026-01-31T12:00:00Z"
    return {"string": "a" * min(63, schema.get("maxLength", 63)), "integer": 7, "number": 0.5, "boolean": True}[
        schema["type"]
    ]


@pytest.mark.parametrize("kind", ["RLJob", "RLJobScale"])
def test_a_status_with_every_field_set_is_stored_unchanged(cluster, namespace, kind):
    definition = definitions()[f"{kind.lower()}s"]
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
    status, path = sample(schema), cluster.api.path(API, kind, namespace)
    body = MANIFEST if kind == "RLJob" else {"metadata": {"name": "sums"}, "spec": {}}
    cluster.api.post(path, {**body, "apiVersion": API, "kind": kind})
    header = {"apiVersion": API, "kind": kind, "metadata": {"name": "sums"}}
    cluster.api.apply(f"{path}/sums/status", header | {"status": status}, fieldValidation="Strict")
    assert cluster.api.get(f"{path}/sums")["status"] == status


def test_a_status_that_its_models_reject_is_rejected(cluster, namespace):
    path = cluster.api.path(API, "RLJob", namespace)
    cluster.api.post(path, MANIFEST)
    header = {"apiVersion": API, "kind": "RLJob", "metadata": {"name": "sums"}}
    for status in (
        {
            "conditions": [
                {"type": "Odd", "status": "Perhaps", "reason": "X", "lastTransitionTime": "2026-01-01T00:00:00Z"}
            ]
        },
        {"startTime": "yesterday"},
        {"run": {"state": "Dancing"}},
        {"roles": [{"name": "a", "desired": -1, "ready": 0}]},
    ):
        with pytest.raises(ApiError, match="Invalid"):
            cluster.api.apply(f"{path}/sums/status", header | {"status": status})


def test_the_files_of_the_chart_equal_those_in_crds(cluster):
    for name in definitions():
        plain, chart = ((ROOT / folder / f"rljob.dev_{name}.yaml").read_text() for folder in ("crds", CHART / "files"))
        assert plain == chart
        assert yaml.safe_load(plain)["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
