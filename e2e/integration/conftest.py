"""Marks the tests of this folder: they need a real API server (fixtures: tools/cluster/fixtures.py)."""

from __future__ import annotations

from collections.abc import Iterator
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
def where(plane: ControlPlane) -> Iterator[str]:
    """A namespace of the test's own on ``plane``, the control plane of its module."""
    name = plane.namespace()
    yield name
    plane.api.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture
def helm(tmp_path, cluster: ControlPlane) -> Helm:
    """helm with the kubeconfig of the cluster."""
    return Helm(tmp_path, cluster.kubeconfig)
