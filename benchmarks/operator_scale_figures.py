"""What the sizes of the operator scale benchmark show together: growth, what bends the curve, and the targets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.operator_scale_usage import BENCHMARK, OPERATOR
from benchmarks.report import target

Size = Mapping[str, Any]
"""Figures of one size: the result of :func:`benchmarks.operator_scale_phases.measure_size`."""
BEND = 1.1
"""Increase of the CPU time per job of all processes that counts as a bend of the curve."""
MEMORY_MIB = 1024
"""The memory limit of the operator in the chart."""


def growth(sizes: Sequence[Size]) -> dict[str, Any]:
    """Return how times and CPU grow with the number of jobs. Needs at least two sizes, the smallest first.

    ``exponent``: of the time until all jobs run, between two neighbouring sizes; 1 is a constant number of jobs/s.
    ``cpu_seconds_per_job``: process → at the smallest and at the largest size. ``bends``: the process whose CPU time
    per job increases most, and its share of that increase; None if the CPU time of all grows by less than BEND. Where
    ``busy`` is near 1 the machine is the limit; where ``machine_busy`` is much larger, other programs ran beside.
    """
    first, last = sizes[0]["created"], sizes[-1]["created"]
    names = [name for name in last["cpu_seconds_per_job"] if name != BENCHMARK]
    per_job = {name: [each["cpu_seconds_per_job"][name] for each in (first, last)] for name in names}
    before, total = (sum(values) for values in zip(*per_job.values(), strict=True))
    increase = {name: last - first for name, (first, last) in per_job.items()}
    most = max(increase, key=lambda name: increase[name])
    share = round(increase[most] / sum(value for value in increase.values() if value > 0), 3) if total > before else 0.0
    return {
        "exponent": {f"{one['jobs']}-{two['jobs']}": exponent(one, two) for one, two in pairwise(sizes)},
        **{what: {str(each["jobs"]): each["created"][what] for each in sizes} for what in ("busy", "machine_busy")},
        "cpu_seconds_per_job": per_job | {"all": [round(before, 4), round(total, 4)]},
        "share_at_largest": {name: round(after / total, 3) for name, (_, after) in per_job.items()},
        "bends": {"process": most, "share": share} if total > BEND * before else None,
    }


def exponent(one: Size, two: Size) -> float:
    """Return the x of time ~ jobs^x between two sizes."""
    times = math.log(two["created"]["running_s"] / one["created"]["running_s"])
    return round(times / math.log(two["jobs"] / one["jobs"]), 3)


def targets_of(sizes: Sequence[Size]) -> dict[str, Any]:
    """Return the targets: what an operator does for one job must not depend on the number of jobs."""
    first, last = sizes[0], sizes[-1]

    def ratio(value: Any) -> float:
        return round(value(last["created"]) / value(first["created"]), 3)

    found = {
        "writes_at_rest": target(sum(size["rest"]["writes_per_minute"] for size in sizes), "<=", 0),
        "surplus_writes_after_restart": target(sum(size["restart"]["surplus_writes"] for size in sizes), "<=", 0),
        "unanswered_changes": target(
            sum(size[edits]["unanswered"] for size in sizes for edits in ("edits", "edits_while_reporting")), "<=", 0
        ),
        "operator_peak_mib": target(max(size["operator_peak_mib"] for size in sizes), "<=", MEMORY_MIB),
        "restart_converged_s": target(last["restart"]["converged_s"], "<=", 60),
    }
    if len(sizes) > 1:
        found["operator_writes_per_job_growth"] = target(
            ratio(lambda created: created["operator"]["writes_per_job"]), "<=", 1.2
        )
        found["operator_cpu_per_job_growth"] = target(
            ratio(lambda created: created["cpu_seconds_per_job"][OPERATOR]), "<=", 1.5
        )
    return found
