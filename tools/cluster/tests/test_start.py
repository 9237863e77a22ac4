"""The output of `make cluster`, without a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.cluster import __main__ as command
from tools.cluster.node import Node, install


@pytest.mark.parametrize(
    ("ran", "expected"), [(False, "The cluster is up after 0.0 s. "), (True, "The cluster ran already. ")]
)
def test_the_command_reports_whether_the_cluster_was_started(
    ran: bool, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    class FakeNode(Node):
        runs = ran
        kubeconfig = bin = Path("here")

        def __init__(self):
            pass

        def start(self, wait=True):
            self.runs = True
            return self

    monkeypatch.setattr(command, "chosen", lambda asked: FakeNode())
    monkeypatch.setattr(install, "from_layout", lambda cluster, tag: None)
    assert command._start("dev", None) == 0
    assert capsys.readouterr().out.startswith(f"{expected}Installed: rljob from the images dev. In a shell:\n")
