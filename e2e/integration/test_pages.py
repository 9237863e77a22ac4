"""Runs the commands that the documentation shows for a cluster, with the chart and the operator that they install."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.docs.blocks import Block, blocks
from e2e.docs.reader import PAGES, matches, shell
from e2e.integration.chart_operator import SYSTEM, ChartOperator
from tools.cluster import build
from tools.cluster.controlplane import ControlPlane

ROOT = Path(__file__).parents[2]
INSTALL = "helm install rljob-crds"
"""A page with this command installs rljob itself; for the others it is installed before."""
TYPES = ("rljobs.rljob.dev", "rljobscales.rljob.dev")
QUOTA_SYNC = "--resource-quota-sync-period=5s"
"""Kubernetes counts objects of new types for quotas at its next synchronization; the default is five minutes."""
NEW_CLUSTER = "research"
"""Namespace of the context ``new-cluster``. Both clusters of a page are namespaces of one."""


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """A control plane without the CRDs and the chart of rljob."""
    with ControlPlane(flags={"controller-manager": [QUOTA_SYNC]}) as plane:
        plane.nodes(2, gpus=8)
        yield plane


@pytest.fixture
def reader(plane: ControlPlane, tmp_path: Path, monkeypatch) -> Path:
    """A reader's directory, with kubectl and helm on the PATH and the kubeconfig of the cluster."""
    for name in ("examples", "charts"):
        (tmp_path / name).symlink_to(ROOT / name)
    programs = f"{plane.bin}:{build.ensure('helm')}"
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("KUBECONFIG", str(contexts(plane, tmp_path / "kubeconfig")))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def contexts(plane: ControlPlane, path: Path) -> Path:
    """Write the administrator's kubeconfig with the contexts ``old-cluster`` and ``new-cluster``; return its path."""
    config = json.loads(plane.kubeconfig.read_text())
    [usual] = config["contexts"]
    for name, namespace in (("old-cluster", "default"), ("new-cluster", NEW_CLUSTER)):
        config["contexts"].append({"name": name, "context": usual["context"] | {"namespace": namespace}})
    path.touch(mode=0o600)
    path.write_text(json.dumps(config))
    return path


@pytest.fixture
def cleaned(plane: ControlPlane, reader: Path) -> Iterator[None]:
    """Removes after the test what a page and its charts have left."""
    before = {each["metadata"]["name"] for each in plane.api.list("/api/v1/namespaces")}
    yield
    if plane.api.exists(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{TYPES[0]}"):
        shell("kubectl delete rlj --all --all-namespaces --timeout=60s", reader)
    shell(f"helm uninstall rljob rljob-crds -n {SYSTEM} --ignore-not-found", reader)
    shell(f"kubectl delete crd --ignore-not-found --timeout=60s {' '.join(TYPES)}", reader)
    shell("kubectl delete pvc,jobs,pods --all -n default --timeout=60s", reader)
    if new := {each["metadata"]["name"] for each in plane.api.list("/api/v1/namespaces")} - before:
        shell(f"kubectl delete namespace {' '.join(sorted(new))} --timeout=90s", reader)
    shell("kubectl uncordon --selector type=kwok", reader)


def install(plane: ControlPlane, where: Path) -> None:
    """Install both charts, as docs/kubernetes.md shows it."""
    shell(f"{INSTALL} charts/rljob-crds --namespace {SYSTEM} --create-namespace --wait", where)
    shell(f"helm install rljob charts/rljob --namespace {SYSTEM}", where)
    plane.api.post("/api/v1/namespaces", {"metadata": {"name": NEW_CLUSTER}})


def run(block: Block, where: Path, operator: ChartOperator) -> None:
    """Run a block's commands and compare their output with the block. ``operator`` follows its Deployment."""
    for i, (command, expected) in enumerate(block.commands):
        code = block.exit_code if i == len(block.commands) - 1 else 0
        printed = shell(command, where, code)
        assert matches(expected, printed), f"{block}: {command} printed\n{printed}\ninstead of\n{expected}"
        operator.follow()


def on_clusters() -> list[Path]:
    return [page for page in PAGES if any(block.cluster for block in blocks(page))]


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("cleaned")
@pytest.mark.parametrize("page", on_clusters(), ids=lambda page: page.name)
def test_the_commands_of_a_page_work_on_a_cluster(page: Path, plane: ControlPlane, reader: Path):
    with ChartOperator(plane, reader) as operator:
        if INSTALL not in page.read_text():
            install(plane, reader)
            operator.follow()
        for block in blocks(page):
            if not block.cluster or block.reason is not None:
                continue
            if block.file is not None:
                (reader / block.file).write_text(block.text)
                continue
            run(block, reader, operator)
        if operator.process is not None:
            operator.stop()
