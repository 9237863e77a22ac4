"""Expansion of a manifest: presets and defaults of governed fields, and the paths of models and data.

Paths are those of a user's machine, or job://PATH for files in the job's storage.
"""

from __future__ import annotations

from pathlib import Path

from rljob.api.algorithm import PRESETS
from rljob.api.models import RLJob

DEFAULT_PROMPT = "{question}\n"
HELD_OUT_FRACTION = 0.1
IN_STORAGE = "job://"


def resolve(job: RLJob) -> RLJob:
    """Return a copy of ``job`` in which every field that a preset or another field governs has its value."""
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


def in_storage(text: str, storage: Path) -> str:
    """Return ``text`` with job://PATH replaced by its path in ``storage``."""
    return text.replace(IN_STORAGE, f"{storage}/")


def with_absolute_paths(job: RLJob, base: Path) -> RLJob:
    """Return a copy of ``job`` in which relative paths of models and data are absolute, relative to ``base``.

    With absolute paths, processes and later runs find the same files from any working directory.
    """
    absolute = job.model_copy(deep=True)
    for model in absolute.spec.models:
        model.source = _absolute(model.source, base)
    for task in absolute.spec.tasks:
        for table in (task.data.jsonl, task.data.parquet):
            if table is not None:
                table.path = _absolute(table.path, base)
                table.held_out_path = table.held_out_path and _absolute(table.held_out_path, base)
        if task.data.datasets is not None:
            task.data.datasets.path = _absolute(task.data.datasets.path, base)
    return absolute


def _absolute(path: str, base: Path) -> str:
    return path if path.startswith(IN_STORAGE) else str((base / path).absolute())
