"""The smallest useful manifest. Tests change single fields of it."""

from typing import Any

from rljob.api.algorithm_presets import NEEDS_STATES, PRESETS

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

WITH_TEACHER = (
    "spec.models=[{name: policy, source: 'job://model'}, {name: big, source: 'job://big'}]",
    "spec.algorithm.teachers=[{model: big}]",
)
"""Entries as for --set."""


def entries_of(preset: str) -> tuple[str, ...]:
    """Return the entries, as for --set, that choose a preset, with the teacher or loop that it may need, without the
    warm-up of a critic, which must be shorter than training."""
    needs_teacher = PRESETS[preset]["advantage"] == "zero"
    warm = ("spec.algorithm.criticWarmupSteps=0",) if "critic_warmup_steps" in PRESETS[preset] else ()
    loop = ('spec.tasks[0].loop="mine:loop"',) if PRESETS[preset]["advantage"] in NEEDS_STATES else ()
    return (*loop, f"spec.algorithm.preset={preset}", *warm, *(WITH_TEACHER if needs_teacher else ()))
