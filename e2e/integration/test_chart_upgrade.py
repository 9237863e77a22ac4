"""Upgrade from the charts of an older commit with a live job, rollback, and uninstallation: no pod of the job changes.

The operators are real processes, each of the sources of its chart's commit.
"""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from e2e.integration.chart_operator import OPERATOR, SYSTEM, ChartOperator
from e2e.integration.helm_program import Helm
from e2e.integration.operators import job
from tools.cluster.client import API
from tools.cluster.controlplane import ControlPlane

ROOT = Path(__file__).parents[2]
OLD = "e233c80839739b2367bbab65fd50e5ba43b547e5"
"""The last commit whose operator was not a kopf operator."""
SECONDS = 90.0
LABEL = "rljob.dev/job=sums"
RLJOB = f"/apis/{API}/namespaces/default/rljobs"


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the charts and the operator of the older commit."""
    known = subprocess.run(["git", "cat-file", "-e", f"{OLD}^{{commit}}"], cwd=ROOT, capture_output=True)
    if known.returncode:
        pytest.skip(
            f"the commit {OLD[:8]} is not in this clone: a shallow clone has no older charts (git fetch --unshallow)"
        )
    archive = subprocess.run(
        ["git", "archive", OLD, "charts", "core/src", "operator/src"], cwd=ROOT, capture_output=True, check=True
    )
    path = tmp_path_factory.mktemp("old")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as members:
        members.extractall(path, filter="data")
    return path


class Installation:
    """Both charts of two versions on a cluster, one operator, and a job that runs."""

    def __init__(self, plane: ControlPlane, helm: Helm, operator: ChartOperator, old: Path) -> None:
        self.plane, self.helm, self.operator, self._old = plane, helm, operator, old
        self.api = plane.api

    def charts(self, old: bool) -> Path:
        return (self._old if old else ROOT) / "charts"

    def install(self, *, old: bool) -> None:
        """Install both charts and start the operator."""
        crds = str(self.charts(old) / "rljob-crds")
        self.helm("install", "rljob-crds", crds, "-n", SYSTEM, "--create-namespace", "--wait")
        self.helm("install", "rljob", str(self.charts(old) / "rljob"), "-n", SYSTEM)
        self.start(old=old)

    def upgrade(self, name: str) -> None:
        """Upgrade one release to the charts of this repository."""
        self.helm("upgrade", name, str(self.charts(False) / name), "-n", SYSTEM, "--reset-then-reuse-values")

    def start(self, *, old: bool) -> None:
        """Start the operator of the installed release, instead of the one that runs."""
        if self.operator.process is not None:
            self.operator.stop()
        self.operator.start([self._old / "operator/src", self._old / "core/src"] if old else [])

    def run_up(self, **spec: object) -> None:
        """Create a job and report that it runs, as its coordinator does."""
        self.api.create(job("default", **spec))
        self.until(self._all_ready, "all pods to be ready")
        self.report("Running")

    def _all_ready(self) -> bool:
        roles = self.api.get(f"{RLJOB}/sums").get("status", {}).get("roles", ())
        return bool(roles) and all(role["ready"] == role["desired"] > 0 for role in roles)

    def report(self, state: str) -> None:
        """Apply status.run; wait until the operator has turned it into the reason of Ready."""
        self.apply_run(state)
        self.until(lambda: self.reason() == state, f"the reason {state}")

    def apply_run(self, state: str) -> None:
        """Apply status.run with ``state``, as the coordinator does."""
        body = self.api.get(f"{RLJOB}/sums")
        run = {"state": state, "observedGeneration": body["metadata"]["generation"]}
        status = {"apiVersion": API, "kind": "RLJob", "metadata": {"name": "sums"}, "status": {"run": run}}
        self.api.apply(f"{RLJOB}/sums/status", status, "rljob-coordinator")

    def until(self, probe: Callable[[], bool], what: str) -> None:
        """Wait until ``probe`` is true; an error has the status of the job and the end of the operator's log."""
        try:
            self.api.wait_for(probe, SECONDS, what=what)
        except TimeoutError as error:
            status = self.api.get(f"{RLJOB}/sums").get("status", {})
            raise AssertionError(f"{error}; {status}; {self.operator.log.read_text()[-3000:]}") from error

    def reason(self, name: str = "sums", kind: str = "Ready") -> str:
        """Return the reason of a condition."""
        status = self.api.get(f"{RLJOB}/{name}").get("status", {})
        return next((each["reason"] for each in status.get("conditions", ()) if each["type"] == kind), "")

    def pods(self) -> dict[str, tuple[str, int]]:
        """Return pod → uid and restarts."""
        pods = self.api.list("/api/v1/namespaces/default/pods", labelSelector=LABEL)
        return {
            pod["metadata"]["name"]: (
                pod["metadata"]["uid"],
                sum(each["restartCount"] for each in pod["status"]["containerStatuses"]),
            )
            for pod in pods
        }


@contextmanager
def cluster_of_its_own() -> Iterator[ControlPlane]:
    """A cluster without the CRDs."""
    with ControlPlane() as plane:
        plane.nodes(2, gpus=8)
        yield plane


@pytest.fixture
def here(old: Path, tmp_path: Path) -> Iterator[Installation]:
    with cluster_of_its_own() as plane, ChartOperator(plane, tmp_path) as operator:
        yield Installation(plane, Helm(tmp_path, plane.kubeconfig), operator, old)


@pytest.mark.timeout(600)
def test_an_upgrade_a_rollback_and_an_uninstallation_change_no_pod_of_a_live_job(here: Installation):
    here.install(old=True)
    here.run_up()
    pods = here.pods()
    assert len(pods) == 6, pods  # coordinator, runner, reward, trainer and two engines

    here.upgrade("rljob-crds")
    here.report("Evaluating")  # the older operator works with the newer types
    here.upgrade("rljob")
    here.start(old=False)
    here.report("Running")
    assert here.pods() == pods

    # What is new works after the upgrade, for the job that was there before.
    here.api.patch(f"{RLJOB}/sums", {"spec": {"rollouts": [{"name": "main", "replicas": {"min": 2, "max": 6}}]}})
    here.until(lambda: here.api.get(f"{RLJOB}/sums")["status"].get("observedGeneration") == 2, "generation 2")
    here.api.create(job("default", "newer", storage={"className": "standard", "accessModes": ["ReadWriteOnce"]}))
    here.until(lambda: here.reason("newer") not in ("", "InvalidSpec"), "the newer job to start")
    assert here.pods() == pods

    # The types go back too: the API server would give the older operator defaults of fields that it does not know.
    here.helm("rollback", "rljob", "1", "-n", SYSTEM)
    here.helm("rollback", "rljob-crds", "1", "-n", SYSTEM)
    here.start(old=True)
    here.report("Evaluating")
    here.until(lambda: here.reason("newer") not in ("", "InvalidSpec"), "the newer job without its new fields")
    assert here.pods() == pods

    here.upgrade("rljob-crds")
    here.upgrade("rljob")
    here.start(old=False)
    here.report("Running")
    here.until(lambda: here.reason("newer") not in ("", "InvalidSpec"), "the newer job again")
    assert here.pods() == pods

    here.helm("uninstall", "rljob", "-n", SYSTEM)
    here.operator.stop()
    here.helm("uninstall", "rljob-crds", "-n", SYSTEM)
    assert here.api.get(f"{RLJOB}/sums")["metadata"]["name"] == "sums"
    assert here.pods() == pods
    here.helm("install", "rljob-crds", str(here.charts(False) / "rljob-crds"), "-n", SYSTEM, "--take-ownership")
    here.helm("install", "rljob", str(here.charts(False) / "rljob"), "-n", SYSTEM)
    here.start(old=False)
    here.report("Evaluating")
    assert here.pods() == pods


@pytest.mark.skipif(not os.environ.get("RLJOB_THOROUGH"), reason="RLJOB_THOROUGH is not set: a minute and a half")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", ["rljob", "rljob-crds"])
def test_between_the_two_upgrades_no_pod_changes(here: Installation, first: str):
    """docs/operations/upgrade.md describes what each order costs until the second upgrade."""
    here.install(old=True)
    here.run_up()
    pods = here.pods()
    here.upgrade(first)
    here.start(old=first == "rljob-crds")
    here.apply_run("Finishing")
    if first == "rljob":
        here.until(lambda: "field not declared in schema" in here.operator.log.read_text(), "a refused status")
    else:
        here.until(lambda: here.reason() == "InvalidSpec", "fields that the older operator does not know")
    assert here.pods() == pods
    here.upgrade("rljob" if first == "rljob-crds" else "rljob-crds")
    here.start(old=False)
    here.report("Evaluating")
    assert here.pods() == pods


def test_the_older_operator_is_the_one_of_its_commit(old: Path):
    """Otherwise the tests above would compare this operator with itself."""
    assert not (old / "operator/src/rljob/operator/handlers.py").exists()
    assert (ROOT / "operator/src/rljob/operator/handlers.py").exists()
    assert (old / "charts/rljob/values.yaml").read_text() != (ROOT / "charts/rljob/values.yaml").read_text()
    assert OPERATOR == "rljob-operator"
