"""Marks the tests of this folder: they need a real API server (fixtures: tools/cluster/fixtures.py)."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the marker ``apiserver`` before -m looks at markers."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("apiserver")
