"""Fixtures of the tests on a real API server: one control plane for all of a process, a namespace for each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster import build
from e2e.cluster.controlplane import ControlPlane

ROOT = Path(__file__).parents[2]
NODES, GPUS = 4, 8
TIMEOUT_SECONDS = 300


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, so that -m can leave them out, give them time, and have them run last."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("apiserver")
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TIMEOUT_SECONDS))
    # Last, as the control plane is there until the end, and costs the others a third of a core even when it idles.
    items.sort(key=lambda item: item.get_closest_marker("apiserver") is not None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build before the first test, as the minutes that it takes the first time are not that test's own."""
    if session.config.option.collectonly or not any(item.get_closest_marker("apiserver") for item in session.items):
        return
    terminal = session.config.pluginmanager.getplugin("terminalreporter")  # a worker of pytest-xdist has none
    for name in ("controlplane", "kwok", "helm"):
        build.ensure(name, say=terminal.write_line if terminal is not None else lambda line: None)


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """A control plane with the project's resources and a few nodes, shared by all tests of a process."""
    with ControlPlane(manifests=sorted(ROOT.glob("crds/*.yaml"))) as plane:
        plane.nodes(NODES, gpus=GPUS)
        yield plane


@pytest.fixture
def cluster(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    """The control plane; what a test stopped is started again after it."""
    yield control_plane
    control_plane.restore()


@pytest.fixture
def namespace(cluster: ControlPlane) -> Iterator[str]:
    """A namespace of the test's own; with pods in it, it goes in the background."""
    name = cluster.namespace()
    yield name
    # Without, it stays until the end: it holds no room of nodes, and its deletion costs a core a tenth of a second.
    if cluster.api.list(f"/api/v1/namespaces/{name}/pods", limit=1):
        cluster.api.delete(f"/api/v1/namespaces/{name}")
