"""Marks the tests of this folder: they need a real API server (fixtures: tools/cluster/fixtures.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.integration.helm_program import Helm
from tools.cluster.controlplane import ControlPlane

LATE_CONNECTIONS = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function _SelectorTransport:pytest.PytestUnraisableExceptionWarning"
)
"""A connection that a server accepts while it closes is never closed, and a Prometheus opens them all the time. It
is collected during some other test, which is not to blame."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the marker ``apiserver`` before -m looks at markers."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("apiserver")
            item.add_marker(LATE_CONNECTIONS)


@pytest.fixture(scope="session")
def program(tmp_path_factory) -> Helm:
    """helm without a cluster."""
    return Helm(tmp_path_factory.mktemp("helm"))


@pytest.fixture
def helm(tmp_path, cluster: ControlPlane) -> Helm:
    """helm with the kubeconfig of the cluster."""
    return Helm(tmp_path, cluster.kubeconfig)
