"""A manifest that tests change one thing of."""

import copy

import pytest

MANIFEST = {
    "apiVersion": "rljob.dev/v1alpha1",
    "kind": "RLJob",
    "metadata": {"name": "sums"},
    "spec": {
        "initializer": {"command": ["make-model", "job://model"]},
        "models": [{"name": "policy", "source": "job://model"}],
        "training": {"steps": 3},
        "tasks": [{"name": "sums", "data": {"reasoningGym": {"dataset": "chain_sum"}}, "reward": "exact"}],
        "rewards": [{"name": "exact", "builtin": "reasoning_gym"}],
        "rollouts": [{"name": "main"}],
    },
}


@pytest.fixture
def manifest():
    """The smallest useful manifest as data; each test gets its own."""
    return copy.deepcopy(MANIFEST)
