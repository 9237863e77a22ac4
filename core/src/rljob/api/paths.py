"""Where a manifest's files are: paths of a person's machine, and job://PATH for those in the job's storage."""

from __future__ import annotations

from pathlib import Path

from rljob.api.models import RLJob

IN_STORAGE = "job://"


def in_storage(text: str, storage: Path) -> str:
    """Return ``text`` with job://PATH replaced by PATH in ``storage``."""
    return text.replace(IN_STORAGE, f"{storage}/")


def with_absolute_paths(job: RLJob, base: Path) -> RLJob:
    """Return a copy of ``job`` in which relative paths of models and data are absolute, seen from ``base``.

    So its parts and later runs find the same files wherever they are started.
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
