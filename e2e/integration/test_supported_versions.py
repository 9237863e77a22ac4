"""What rljob gives to an API server is accepted strictly, by the oldest and the newest supported version too.

With RLJOB_THOROUGH=1 the tests of the API are run again on both versions, each in a process of its own with the
variable RLJOB_KUBERNETES. Their control planes are built from Go modules first.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.faults.cases import THOROUGH
from e2e.integration.chart_goldens import VALUES
from e2e.integration.helm_program import Helm
from tools.cluster import build
from tools.cluster.controlplane import ControlPlane

ROOT = Path(__file__).parents[2]
OTHERS = ("cert-manager.io", "monitoring.coreos.com")
"""Groups of other projects; e2e/integration/test_chart_monitoring.py validates objects against their CRDs."""
STRICT = {"dryRun": "All", "fieldValidation": "Strict"}
FILES = (
    "test_rendered_objects.py",
    "test_crd_install.py",
    "test_crd_rules.py",
    "test_crd_bounds.py",
    "test_crd_columns.py",
    "test_crd_conditions.py",
    "test_crd_status_policy.py",
    "test_chart.py",
    "test_chart_pods.py",
    "test_supported_versions.py",
    "test_operator_kopf.py",
    "test_operator_webhook.py",
    "test_operator_life.py",
)
"""Tests of what API servers accept, and of an operator that runs jobs with the controllers and the scheduler."""


@pytest.mark.parametrize("values", sorted(VALUES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_object_of_the_chart_is_accepted_strictly(cluster: ControlPlane, program: Helm, values: Path):
    api, found = cluster.api, program.template("--values", str(values))
    own = [each for each in found if each["apiVersion"].partition("/")[0] not in OTHERS]
    for namespace in {each["metadata"].get("namespace") for each in own} - {None}:
        if not api.exists(f"/api/v1/namespaces/{namespace}"):
            api.post("/api/v1/namespaces", {"metadata": {"name": namespace}})
    api.warnings.clear()
    for each in own:
        collection = api.path(each["apiVersion"], each["kind"], each["metadata"].get("namespace"))
        api.apply(f"{collection}/{each['metadata']['name']}", each, "helm", **STRICT)
    assert api.warnings == []


def test_the_control_plane_has_the_version_that_was_asked_for(cluster: ControlPlane):
    asked = os.environ.get(build.VERSION)
    known = re.search(r"k8s\.io/kubernetes v(1\.\d+)", (build.HERE / "controlplane/go.mod").read_text())
    assert known is not None
    found = cluster.api.get("/version")
    assert f"{found['major']}.{found['minor']}" == (asked or known[1])


def test_another_version_is_refused_by_name():
    with pytest.raises(build.BuildError, match=r"RLJOB_KUBERNETES: must be one of 1\.33, 1\.37, or empty, not '1\.12'"):
        build.control_plane("1.12")


@pytest.mark.skipif(not os.environ.get(THOROUGH), reason=f"{THOROUGH} is not set")
@pytest.mark.skipif(bool(os.environ.get(build.VERSION)), reason="these tests run in themselves")
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("version", build.OTHER_VERSIONS)
def test_the_tests_of_the_api_pass_on_every_supported_version(version: str):
    command = [sys.executable, "-m", "pytest", "-q", "-x", *(str(Path(__file__).with_name(name)) for name in FILES)]
    environment = {key: value for key, value in os.environ.items() if key != THOROUGH} | {build.VERSION: version}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
