"""A manifest that tests change one thing of."""

import copy

import pytest

from core.tests.manifests import MANIFEST


@pytest.fixture
def manifest():
    """The smallest useful manifest as data; each test gets its own."""
    return copy.deepcopy(MANIFEST)
