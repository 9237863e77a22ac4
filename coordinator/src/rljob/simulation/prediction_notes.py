"""Sentences below a prediction: what it assumes, and figures that are not what they seem."""

from __future__ import annotations

from collections.abc import Iterator

from rljob.api.models import RLJob
from rljob.api.speeds import Speeds
from rljob.api.tasks import Task


def prediction_notes(job: RLJob, speeds: Speeds) -> list[str]:
    """Return the notes of a prediction."""
    return [*_about_filters(job, speeds.accepted_groups)]


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
