"""The settings of the scheduler that follow from a manifest."""

from __future__ import annotations

from rljob.api.algorithm_presets import needs_greedy
from rljob.api.models import RLJobSpec
from rljob.api.tasks import TaskGroupFilter
from rljob.scheduling.filters import GroupFilter
from rljob.scheduling.scheduler import Settings


def scheduler_settings(spec: RLJobSpec) -> Settings:
    """Return the scheduling settings of the manifest."""
    return Settings(
        steps=spec.training.steps,
        groups_per_batch=spec.training.prompts_per_step,
        samples_per_group=spec.training.samples_per_prompt,
        max_staleness=spec.training.max_staleness,
        redundant_groups=spec.scheduling.redundancy.groups,
        redundant_members=spec.scheduling.redundancy.members,
        regenerate=spec.scheduling.on_deadline == "regenerate",
        filters={task.name: _filter_of(task.group_filter) for task in spec.tasks},
        seed=spec.seed,
        greedy=needs_greedy(spec.algorithm),
    )


def _filter_of(settings: TaskGroupFilter) -> GroupFilter:
    bounds = {"min_mean": settings.min_mean, "max_mean": settings.max_mean}
    given = {name: bound for name, bound in bounds.items() if bound is not None}
    return GroupFilter(settings.kind == "nonconstant", **given, function=settings.function or "")
