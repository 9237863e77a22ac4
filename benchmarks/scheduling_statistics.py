"""Statistics of the scheduling benchmark: distributions, confidence intervals, the Kolmogorov–Smirnov test."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rljob.coordinator.answer_lengths import kolmogorov_p
from rljob.scheduling.seeds import derive

NORMAL = statistics.NormalDist()
QUANTILE = NORMAL.inv_cdf(0.975)


def uniform(seed: int, name: str, number: int = 0, kind: int = 0) -> float:
    """Return a number in (0, 1) that depends on the arguments alone: all policies draw the same for a sample."""
    return fraction(derive(seed, name, number, kind))


def fraction(seed: int) -> float:
    """Return a sampling seed (< 2**63) as a number in (0, 1)."""
    return (seed + 0.5) / 2**63


def draw(distribution: Mapping[str, Any], at: float) -> float:
    """Return the quantile ``at`` of a distribution of a scenario file.

    Args:
        distribution: lognormal (median, sigma, cap) or normal (mean, std, floor).
        at: in (0, 1).
    """
    normal = NORMAL.inv_cdf(at)
    if distribution["dist"] == "lognormal":
        return float(min(distribution["cap"], distribution["median"] * math.exp(distribution["sigma"] * normal)))
    return float(max(distribution["floor"], distribution["mean"] + distribution["std"] * normal))


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> dict[str, float]:
    """Return mean(numerator) / mean(denominator) of paired replications, with its 95 % confidence interval."""
    value = statistics.fmean(numerator) / statistics.fmean(denominator)
    residuals = [above - value * below for above, below in zip(numerator, denominator, strict=True)]
    error = statistics.stdev(residuals) / math.sqrt(len(residuals)) / statistics.fmean(denominator)
    half = student_quantile(len(residuals) - 1) * error
    return {"value": value, "low": value - half, "high": value + half}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the mean of at least two values."""
    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    half = student_quantile(len(values) - 1) * error
    return mean - half, mean + half


def student_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's distribution, within 1 % from 4 degrees of freedom on (Cornish and
    Fisher's expansion)."""
    z = QUANTILE
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom ** (i + 1) for i, term in enumerate(terms))


def same_distribution(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the p-value of the two-sample Kolmogorov–Smirnov test (asymptotic)."""
    a, b = sorted(first), sorted(second)
    i = j = 0
    distance = 0.0
    while i < len(a) and j < len(b):
        value = min(a[i], b[j])
        while i < len(a) and a[i] <= value:
            i += 1
        while j < len(b) and b[j] <= value:
            j += 1
        distance = max(distance, abs(i / len(a) - j / len(b)))
    return kolmogorov_p(distance, len(a) * len(b) / (len(a) + len(b)))
