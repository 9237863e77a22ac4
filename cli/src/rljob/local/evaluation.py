"""Derives the job that evaluates a checkpoint of a run, without training."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rljob.api.explain import to_data
from rljob.api.load import override, validate
from rljob.api.models import RLJob
from rljob.api.resolve import IN_STORAGE, in_storage
from rljob.local import checkpoints, find_run
from rljob.local.checkpoints import RunCheckpoint
from rljob.local.run_directory import RunDirectory
from rljob.protocol.checkpoint_record import find_damage, find_unrecorded

DIGEST_DIGITS = 12


def evaluation_job(
    job: RLJob, model: Path, storage: Path, problems: int | None, overrides: Sequence[str] = ()
) -> RLJob:
    """Return the job that evaluates ``model`` on the held-out problems of ``job``.

    Args:
        job: resolved, of the run that wrote the model.
        model: its directory, see :func:`evaluated_model`.
        storage: the directory of that run; its files are read in place.
        problems: per task; None: the value of the job.
        overrides: each PATH=VALUE, applied to the derived job.

    Raises:
        ManifestError: an override is invalid.
    """
    data = _with_absolute_paths(to_data(job), storage)
    spec = data["spec"]
    spec["initializer"] = None
    served = {pool["model"] for pool in spec["rollouts"]} - {"policy"}  # others are a reference and teachers
    kept = [entry for entry in spec["models"] if entry["name"] in served]
    spec["models"] = [{"name": "policy", "source": str(model)}, *kept]
    spec["algorithm"] = {}
    spec["training"]["steps"] = 0
    spec["checkpoints"]["uri"] = None  # that of the run that is evaluated
    spec["evaluation"] = (spec["evaluation"] or {}) | {"engines": "shared", "everySteps": 0}
    if problems is not None:
        spec["evaluation"]["problems"] = problems
    spec["rollouts"] = [pool for pool in spec["rollouts"] if pool["purpose"] == "training"]
    for entry in overrides:
        override(data, entry)
    return validate(data)


def evaluated_model(run: RunDirectory, checkpoint: RunCheckpoint) -> Path:
    """Return a copy of a checkpoint's model: an earlier one if it has the recorded files and no others, else a new one.
    A repeated step may have other weights; then it has a copy of its own.

    Raises:
        CliError: as :func:`rljob.local.checkpoints.export`.
    """
    model = run.path / "evaluations" / f"model-{checkpoint.step:06d}-{checkpoint.digest[:DIGEST_DIGITS]}"
    if model.exists():
        files = checkpoints.recorded_files(checkpoint)
        if not (find_damage(model, files) or find_unrecorded(model, files)):
            return model
        shutil.rmtree(model)
    checkpoints.export(checkpoint, model)
    return model


def evaluation_path(run: RunDirectory, step: int, job: RLJob) -> Path:
    """Return the run directory of the evaluation ``job`` at ``step``: that of an equal earlier job, else a new one."""
    first = run.path / "evaluations" / f"step-{step:06d}"
    others = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    for path in itertools.chain([first], others):
        if not find_run.is_run(path) or to_data(RunDirectory(path).job()) == to_data(job):
            return path
    raise AssertionError("itertools.count is infinite")


def _with_absolute_paths(value: Any, storage: Path) -> Any:
    """Return ``value`` with every job://PATH replaced by an absolute path."""
    if isinstance(value, dict):
        return {key: _with_absolute_paths(inner, storage) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_absolute_paths(inner, storage) for inner in value]
    return in_storage(value, storage) if isinstance(value, str) and value.startswith(IN_STORAGE) else value
