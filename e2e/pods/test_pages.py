"""The commands that the documentation shows where pods run are run there, with rljob installed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from e2e.docs.blocks import blocks
from e2e.docs.reader import PAGES, matches, shell
from tools.cluster import build
from tools.cluster.node import Cluster
from tools.cluster.node.install import Installation

ROOT = Path(__file__).parents[2]


@pytest.fixture
def reader(node: Cluster, installed: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's directory, with kubectl and helm on the PATH and the cluster theirs."""
    for name in ("examples", "charts"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.setenv("PATH", f"{node.bin}:{build.ensure('helm')}:{os.environ['PATH']}")
    monkeypatch.setenv("KUBECONFIG", str(node.kubeconfig))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(block.pods for block in blocks(page))], ids=lambda page: page.name
)
def test_the_commands_of_a_page_work_where_pods_run(page: Path, reader: Path):
    for block in blocks(page):
        for i, (command, expected) in enumerate(block.commands if block.pods else []):
            printed = shell(command, reader, block.exit_code if i == len(block.commands) - 1 else 0)
            assert matches(expected, printed), f"{block}: {command} printed\n{printed}\nand not\n{expected}"
