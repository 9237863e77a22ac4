"""The smallest useful manifest. Tests change single fields of it."""

from typing import Any

MANIFEST: dict[str, Any] = {
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
