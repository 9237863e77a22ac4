"""What a step needs of the steps before it: moments of their rewards, and the adapted coefficient of KL.

Both follow from the recorded metrics of the steps, so a restarted coordinator and a batch that is applied again have
the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from rljob.api.algorithm import Algorithm
from rljob.protocol.trainer_protocol import EarlierSteps

LARGEST_CHANGE = 0.2
"""Bound of the relative error of the KL divergence (Ziegler et al. 2019, arXiv 1909.08593)."""
MEASURED_KL = "trainer/reference_kl_k3"


class EarlierStepsHistory:
    """The results of each prefix of the steps of a run.

    Args:
        algorithm: resolved.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        coefficient = algorithm.kl_coefficient if algorithm.kl_target is not None else None
        self._before = [EarlierSteps(kl_coefficient=coefficient)]  # by step

    def before(self, step: int) -> EarlierSteps:
        """Return what the steps before ``step`` leave for it; all of them were added."""
        return self._before[step]

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a step, in order; ``metrics``: those that the ledger records."""
        assert step == len(self._before) - 1, f"step {step} follows step {len(self._before) - 2}"
        self._before.append(after(self._before[-1], metrics, self._algorithm))


def after(earlier: EarlierSteps, metrics: Mapping[str, float], algorithm: Algorithm) -> EarlierSteps:
    """Return what a step and those before it leave for the next one.

    Args:
        earlier: of the step.
        metrics: of the step.
        algorithm: resolved.
    """
    samples = int(metrics["samples"])
    later = earlier.with_rewards(samples, metrics["reward/mean"], samples * metrics["reward/std"] ** 2)
    adapted = _adapted(earlier.kl_coefficient, metrics.get(MEASURED_KL, math.nan), algorithm)
    return msgspec.structs.replace(later, kl_coefficient=adapted)


def _adapted(coefficient: float | None, measured: float, algorithm: Algorithm) -> float | None:
    if coefficient is None or not math.isfinite(measured):
        return coefficient
    assert algorithm.kl_target is not None and algorithm.kl_horizon is not None, "resolved"
    error = min(LARGEST_CHANGE, max(-LARGEST_CHANGE, measured / algorithm.kl_target - 1))
    return coefficient * (1 + error / algorithm.kl_horizon)
