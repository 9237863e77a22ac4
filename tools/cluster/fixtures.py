"""Pytest plugin: one control plane for all tests of a process, and a namespace for each test.

Tests marked ``apiserver`` get the fixtures ``cluster`` and ``namespace``. They run after all other tests, because the
control plane stays until the end and costs the others a third of a core even when it is idle.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tools.cluster import build
from tools.cluster.controlplane import ControlPlane

ROOT = Path(__file__).parents[2]
NODES, GPUS = 4, 8
TIMEOUT_SECONDS = 300
PROGRAMS = {"apiserver": ("controlplane", "kwok", "helm"), "cluster": ("controlplane", "coredns", "pause", "helm")}
"""Marker → the programs that its tests need."""


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, None, None]:
    """Give the marked tests a time limit, and run them last."""
    yield
    for item in items:
        if item.get_closest_marker("apiserver") and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_SECONDS))
    items.sort(key=lambda item: bool(item.get_closest_marker("apiserver")))
    items.sort(key=lambda item: bool(item.get_closest_marker("cluster")))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the programs before the first test, so that a first build does not count in the time-out of a test."""
    if session.config.option.collectonly:
        return
    needed = {marker for marker in PROGRAMS for item in session.items if item.get_closest_marker(marker)}
    terminal = session.config.pluginmanager.getplugin("terminalreporter")  # None in a worker of pytest-xdist
    for name in sorted({name for marker in needed for name in PROGRAMS[marker]}):
        program = build.control_plane() if name == "controlplane" else name
        build.ensure(program, report=terminal.write_line if terminal is not None else lambda line: None)


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """A control plane with the project's resources and a few nodes, shared by all tests of a process."""
    with ControlPlane(manifests=sorted(ROOT.glob("crds/*.yaml"))) as plane:
        plane.nodes(NODES, gpus=GPUS)
        yield plane


@pytest.fixture
def cluster(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    """The control plane; components that a test stopped are started again after it."""
    yield control_plane
    control_plane.restore()


@pytest.fixture
def namespace(cluster: ControlPlane) -> Iterator[str]:
    """A namespace of the test's own; it is deleted in the background if it has pods."""
    name = cluster.namespace()
    yield name
    # An empty namespace stays until the end: it takes no capacity of nodes, and deleting it costs 0.1 s of a core.
    if cluster.api.list(f"/api/v1/namespaces/{name}/pods", limit=1):
        cluster.api.delete(f"/api/v1/namespaces/{name}")
