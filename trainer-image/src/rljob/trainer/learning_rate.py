"""The learning rate of each training step: a function of the step alone, so a resumed run has the same rates.

A backend calls it in its ``update``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from rljob.api.roles import Optimizer


def learning_rate(settings: Optimizer, step: int) -> float:
    """Return the learning rate of a 0-based training step.

    In the warm-up of W steps, step k has (k + 1)/W of the rate. A schedule of S steps falls from the full rate at step
    W to the final one at step S, the first that it has no part in: with finalRatio 0, step S − 1 still learns.

    Args:
        settings: checked by :mod:`rljob.api.optimizer_checks`.
        step: 0-based training step.
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * ((step + 1) / settings.warmup_steps)
    return settings.learning_rate * _share(settings, step)


def _share(settings: Optimizer, step: int) -> float:
    """Return the share of the learning rate at a step after the warm-up."""
    if settings.schedule == "constant":
        return 1.0
    assert settings.schedule_steps is not None
    falls = settings.schedule_steps - settings.warmup_steps
    if settings.schedule == "wsd":
        assert settings.decay_steps is not None
        falls = settings.decay_steps
    passed = min(1.0, max(0.0, 1 - (settings.schedule_steps - step) / falls))
    return 1 - (1 - settings.final_ratio) * FALLS[settings.schedule](passed)


FALLS: dict[str, Callable[[float], float]] = {
    "linear": lambda passed: passed,
    "cosine": lambda passed: (1 - math.cos(math.pi * passed)) / 2,
    "wsd": lambda passed: passed,
}
"""Schedule → share of the way to the final rate, by the share of the falling steps that has passed."""
