"""Sentences below a prediction: what it assumes, and figures that are not what they seem."""

from __future__ import annotations

from collections.abc import Iterator

from rljob.api.models import RLJob
from rljob.api.speeds import Speeds
from rljob.api.tasks import Task
from rljob.protocol.simulation_messages import SplitPrediction


def prediction_notes(job: RLJob, speeds: Speeds, steps: int, splits: list[SplitPrediction]) -> list[str]:
    """Return the notes of the predictions of ``splits`` from ``steps`` counted steps."""
    return [*_about_filters(job, speeds.accepted_groups), *_about_steps(job, steps, splits)]


def is_filtered(task: Task) -> bool:
    """Return whether a filter may reject groups of a task, whose ``kind`` is resolved."""
    settings = task.group_filter
    bounded = settings.min_mean is not None or settings.max_mean is not None
    return settings.kind == "nonconstant" or bounded or settings.function is not None


def _about_filters(job: RLJob, accepted: float) -> Iterator[str]:
    filtered = [task.name for task in job.spec.tasks if is_filtered(task)]
    if not filtered and accepted < 1:
        yield f"acceptedGroups is {accepted:g}, but no task has a groupFilter: every group is trained"
    elif filtered and accepted < 1:
        yield f"acceptedGroups is {accepted:g}: so many groups of {', '.join(filtered)} are trained, chosen at random"
    elif filtered:
        yield (
            f"acceptedGroups is 1: every group of {', '.join(filtered)} is trained, whatever the groupFilter; give the "
            "part that it accepts"
        )


def _about_steps(job: RLJob, steps: int, splits: list[SplitPrediction]) -> Iterator[str]:
    staleness = job.spec.training.max_staleness
    idle = [str(split.engines) for split in splits if not split.tokens_per_second]
    if idle:
        yield (
            f"engines: {', '.join(idle)}: nothing was generated in the counted steps: their samples were ready "
            f"before; raise --steps ({steps})"
        )
    if steps < staleness:
        yield (
            f"--steps is {steps}, less than maxStaleness {staleness}: engines may work ahead or wait in all of them; "
            f"--steps {staleness} gives better means"
        )
