"""Runs the commands that the documentation shows for a cluster, with the chart and the operator that they install."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from e2e.docs.blocks import Block, blocks
from e2e.docs.reader import PAGES, matches, shell
from tools.cluster import build
from tools.cluster.controlplane import ControlPlane
from tools.cluster.processes import free_port

ROOT = Path(__file__).parents[2]
SYSTEM, OPERATOR = "rljob-system", "rljob-operator"


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """A control plane without the CRDs and the chart of rljob."""
    with ControlPlane() as plane:
        plane.nodes(2, gpus=8)
        yield plane


@pytest.fixture
def reader(plane: ControlPlane, tmp_path: Path, monkeypatch) -> Path:
    """A reader's directory, with kubectl and helm on the PATH and the kubeconfig of the cluster."""
    for name in ("examples", "charts"):
        (tmp_path / name).symlink_to(ROOT / name)
    programs = f"{plane.bin}:{build.ensure('helm')}"
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("KUBECONFIG", str(plane.kubeconfig))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def start_operator(plane: ControlPlane, where: Path) -> subprocess.Popen[bytes]:
    """Start the command of the chart's Deployment as a process, with its settings and its service account."""
    config = plane.api.get(f"/api/v1/namespaces/{SYSTEM}/configmaps/{OPERATOR}")
    settings = json.loads(config["data"]["operator.json"]) | {"listen": "127.0.0.1:0"}
    (where / "operator.json").write_text(json.dumps(settings))
    kubeconfig = plane.service_account_kubeconfig(SYSTEM, OPERATOR)
    deployment = plane.api.get(f"/apis/apps/v1/namespaces/{SYSTEM}/deployments/{OPERATOR}")
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    command = [word.replace("/etc/rljob/", f"{where}/") for word in (*container["command"], *container["args"])]
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    command = [re.sub(r"\$\(POD_NAME\):\d+", address, word) for word in command]
    with (where / "operator.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, *command[1:]],
            env=dict(os.environ) | {"KUBECONFIG": str(kubeconfig), "POD_NAMESPACE": SYSTEM, "POD_NAME": "operator"},
            stderr=log,
        )


def run(block: Block, where: Path) -> None:
    """Run a block's commands and compare their output with the block."""
    for i, (command, expected) in enumerate(block.commands):
        code = block.exit_code if i == len(block.commands) - 1 else 0
        printed = shell(command, where, code)
        assert matches(expected, printed), f"{block}: {command} printed\n{printed}\ninstead of\n{expected}"


def on_clusters() -> list[Path]:
    return [page for page in PAGES if any(block.cluster for block in blocks(page))]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", on_clusters(), ids=lambda page: page.name)
def test_the_commands_of_a_page_work_on_a_cluster(page: Path, plane: ControlPlane, reader: Path):
    with ExitStack() as stack:
        operator = None
        for block in blocks(page):
            if not block.cluster or block.reason is not None:
                continue
            run(block, reader)
            if operator is None and plane.api.exists(f"/apis/apps/v1/namespaces/{SYSTEM}/deployments/{OPERATOR}"):
                operator = stack.enter_context(start_operator(plane, reader))
                stack.callback(operator.kill)
        assert operator is not None and operator.poll() is None, (reader / "operator.log").read_text()
