"""Refuses schedules of the learning rate that are incomplete, and fields that the schedule does not read."""

from __future__ import annotations

from collections.abc import Iterator

from rljob.api.roles import Optimizer


def optimizer_problems(optimizer: Optimizer, path: str) -> Iterator[str]:
    """Yield one ``field: sentence`` for each contradiction.

    Args:
        optimizer: of the policy or of the critic.
        path: of the optimizer, relative to spec.
    """
    schedule, steps, decay = optimizer.schedule, optimizer.schedule_steps, optimizer.decay_steps
    if schedule == "constant":
        for field, given in (("scheduleSteps", steps is not None), ("finalRatio", optimizer.final_ratio > 0)):
            if given:
                yield f"{path}.{field}: schedule constant does not read it; remove it, or set another schedule"
    elif steps is None:
        yield f"{path}.scheduleSteps: schedule {schedule} needs it; set it, usually to training.steps"
    elif steps <= optimizer.warmup_steps:
        yield f"{path}.scheduleSteps: {steps} is not more than warmupSteps, {optimizer.warmup_steps}; raise it"
    elif decay is not None and decay > steps - optimizer.warmup_steps:
        yield f"{path}.decaySteps: {decay} is more than scheduleSteps − warmupSteps; lower it"
    if schedule == "wsd" and decay is None:
        yield f"{path}.decaySteps: schedule wsd needs it; set the number of steps in which the learning rate falls"
    elif schedule != "wsd" and decay is not None:
        yield f"{path}.decaySteps: only schedule wsd reads it; remove it, or set schedule: wsd"
