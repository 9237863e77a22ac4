"""Fixtures of the tests whose pods run: one real cluster for all of them, with rljob installed from its images."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from e2e.pods.namespace_report import namespace_report
from e2e.pods.turns import installing, turn
from tools.cluster.node import Cluster, chosen, install
from tools.cluster.node.install import Installation

HERE = Path(__file__).parent
TIMEOUT_SECONDS = 300
START_SECONDS = 900
"""What the first test gets besides, as the cluster is started within it and all images are unpacked, the first time."""
collect_ignore = [] if os.environ.get("RLJOB_E2E_FULL") else ["full"]
"""Tests that take too long for every change; `make e2e-full` sets the variable."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, None, None]:
    """Mark the tests of this folder, so that -m can leave them out, give them time, and have them run last of all."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("cluster")
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TIMEOUT_SECONDS))
    yield
    seen: set[Path] = set()
    for item in items:  # the first test of a file may be the first of its process, and wait for the cluster
        marker = item.get_closest_marker("timeout")
        if (
            marker
            and item.path.is_relative_to(HERE)
            and item.path not in seen
            and "node" in getattr(item, "fixturenames", ())
        ):
            seen.add(item.path)
            item.add_marker(pytest.mark.timeout(marker.args[0] + START_SECONDS), append=False)


@pytest.fixture(scope="session")
def node() -> Iterator[Cluster]:
    """The real cluster: the one that runs (`make cluster`), or one that is started for these tests and stopped.

    Several processes need one that runs: tools/run_tests.py starts it before them and stops it after the last of them.
    RLJOB_E2E_CONTEXT names the context of another one, for tests, that is used instead.
    """
    with chosen() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def installed(node: Cluster) -> Installation:
    """The operator and its types, installed by helm, with all images of rljob in the cluster."""
    with installing():
        return install.from_layout(node)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test marked ``alone`` while no other process runs one on the cluster; the wait is not the test's time."""
    if not item.path.is_relative_to(HERE) or "node" not in getattr(item, "fixturenames", ()):
        return (yield)
    with turn(alone=item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the contents of the test's namespace to the report of a failure."""
    report = yield
    given = getattr(item, "funcargs", {})
    namespace = given["job"].namespace if "job" in given else given.get("namespace")
    if report.failed and report.when in ("setup", "call") and "node" in given and namespace:
        report.sections.append((f"namespace {namespace}", namespace_report(given["node"], namespace)))
    return report
