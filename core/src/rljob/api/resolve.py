"""The only expansion of presets: a job with every governed field filled."""

from __future__ import annotations

from typing import Any

from rljob.api.models import RLJob

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {
        "advantage": "group_normalized",
        "aggregation": "token_mean",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "ratio": "behavior",
        "minibatches": 1,
        "group_filter": "none",
    },
    "dr_grpo": {
        "advantage": "group_centered",
        "aggregation": "token_sum_constant",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "ratio": "behavior",
        "minibatches": 1,
        "group_filter": "none",
    },
}
"""Preset → fields of `algorithm` it fills. A field the user set wins. dualClip stays null: off."""


def resolve(job: RLJob) -> RLJob:
    """Return a copy of ``job`` in which every field governed by a preset or another field has its value."""
    resolved = job.model_copy(deep=True)
    algorithm = resolved.spec.algorithm
    for field, value in PRESETS[algorithm.preset].items():
        if getattr(algorithm, field) is None:
            setattr(algorithm, field, value)
    if resolved.spec.evaluation is not None and resolved.spec.evaluation.tasks is None:
        resolved.spec.evaluation.tasks = [task.name for task in resolved.spec.tasks]
    return resolved
