"""The only expansion of presets: a job with every governed field filled."""

from __future__ import annotations

from typing import Any

from rljob.api.models import RLJob

DEFAULT_PROMPT = "{question}\n"
HELD_OUT_FRACTION = 0.1

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
    for task in resolved.spec.tasks:
        if task.prompt is None and task.messages is None and task.messages_column is None:
            task.prompt = DEFAULT_PROMPT
        for table in (task.data.jsonl, task.data.parquet):
            if table is not None and table.held_out_fraction is None:
                table.held_out_fraction = HELD_OUT_FRACTION if table.held_out_path is None else 0.0
        directory = task.data.datasets
        if directory is not None and directory.held_out_fraction is None:
            directory.held_out_fraction = HELD_OUT_FRACTION if directory.held_out_split is None else 0.0
    return resolved
