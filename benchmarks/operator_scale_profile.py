"""The operator's CPU time by package while jobs start, from cProfile. The profiler itself slows the operator down."""

from __future__ import annotations

import pstats
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.operator_cluster import OperatorProcess, Script, benchmark_cluster
from benchmarks.operator_scale_phases import create, prepare

TOP = 15
PROGRAM = """\
import cProfile, runpy, sys, time
profile = cProfile.Profile(time.process_time)
file, _, module, *arguments = sys.argv[1:]
sys.argv = [module, *arguments]
try:
    profile.runcall(runpy.run_module, module, run_name="__main__", alter_sys=True)
finally:
    profile.dump_stats(file)
"""
"""Runs `-m MODULE` with arguments and writes its profile in CPU time: waiting coroutines count as busy in wall time."""
Function = tuple[str, int, str]
"""File, line and name, as pstats has them."""
_WAITING = re.compile(r"select\.(epoll|poll|select)|'(poll|select)' of 'select\.")
_PACKAGE = re.compile(
    r"site-packages/(?P<site>[^/.]+)|/src/(?P<own>rljob/[^/]+(/planning)?)|/python3[^/]*/(?!site-packages)(?P<std>[^/.]+)"
)


async def measure_profile(jobs: int, pods: int, scratch: Path) -> dict[str, Any]:
    """Return the profile of an operator that starts ``jobs`` jobs. ``scratch``: an empty directory."""
    with benchmark_cluster(scratch) as cluster:
        file = scratch / "operator.profile"
        prepare(cluster, jobs)
        operator = OperatorProcess(cluster, scratch, "operator-a", ["-c", PROGRAM, str(file)])
        await operator.wait_for_lease(cluster)
        async with Script(cluster.plane) as script:
            await create(cluster, operator, script, jobs, pods)
        operator.stop()  # writes the file
        stats = pstats.Stats(str(file)).stats  # type: ignore[attr-defined]
    return {"jobs": jobs, **summary({function: row[2] for function, row in stats.items()})}


def summary(own_seconds: Mapping[Function, float]) -> dict[str, Any]:
    """Return the shares of packages and functions. ``own_seconds``: of each function, without those that it calls."""
    used = {function: spent for function, spent in own_seconds.items() if not _WAITING.search(function[2])}
    total = sum(used.values()) or 1.0
    packages: dict[str, float] = defaultdict(float)
    for function, spent in used.items():
        packages[package_of(function)] += spent / total
    return {
        "seconds": round(total, 2),
        "packages": {name: round(share, 3) for name, share in _largest(packages)},
        "functions": {f"{package_of(what)} {what[2]}": round(spent / total, 3) for what, spent in _largest(used)},
    }


def _largest(values: Mapping[Any, float]) -> list[tuple[Any, float]]:
    return sorted(values.items(), key=lambda item: -item[1])[:TOP]


def package_of(function: Function) -> str:
    """Return the package that a function belongs to; ``built-in`` for one in C."""
    file, _, _ = function
    if file.startswith("<frozen importlib"):
        return "import"
    found = _PACKAGE.search(file)
    if found is None:
        return "built-in" if file in ("~", "") else Path(file).stem
    return next(group for group in (found["site"], found["own"], found["std"]) if group).replace("/", ".")
