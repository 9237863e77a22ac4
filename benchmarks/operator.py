"""The operator with many jobs: how fast, how quiet at rest, how soon after a restart or a change, how large.

    python -m benchmarks.operator --json [--jobs 200] [--pods 16] [--seconds 60] [--pairs 3] [--keep]

On a real API server, with kwok's nodes. The *floor* is the same client with the same verbs, concurrency and
credentials, and nothing to decide: it makes the objects of all jobs, rendered beforehand, in other namespaces of a
control plane of its own. The operator is timed from the first RLJob that is applied to the last child that is stored,
so the time to apply the jobs, its status and its events are on its side only (`floor_with_jobs` applies the jobs too,
and is a figure). Floor and operator alternate, each on a fresh control plane with controllers stopped. The last
operator then goes on: controllers start and make the pods; a rest, in which a script applies status.run of every job
each ten seconds as coordinators do; spec changes, one after another; a restart after a twentieth of the children was
deleted and a twentieth of the specs changed behind its back.

Times are of the API server's audit log and of this machine's clock, and so is what the operator wrote.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import operator_phases as phases
from benchmarks import time_limit
from benchmarks.operator_cluster import OperatorProcess, Place, Script, place
from benchmarks.operator_jobs import namespace
from benchmarks.report import report, target

TIMEOUT_SECONDS = 7200.0  # the programs of the control plane are built first, once, in a dozen minutes
_log = logging.getLogger("benchmark")


async def measure(
    jobs: int, pods: int, seconds: float, every: float, pairs: int, scratch: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return figures and targets of the whole benchmark."""
    floors, floors_with_jobs, operators = [], [], []
    for pair in range(pairs):
        with place(scratch / f"floor-{pair}") as here:
            floors.append(await phases.floor(here, jobs, pods))
            async with Script(here.plane) as script:
                floors_with_jobs.append(await phases.floor(here, jobs, pods, script))
        with place(scratch / f"operator-{pair}") as here:
            here.namespaces(sorted({namespace(i) for i in range(jobs)}))
            operator = OperatorProcess(here, scratch / f"operator-{pair}", "operator-a")
            await operator.at_work(here)
            async with Script(here.plane) as script:
                operators.append(await phases.create(here, script, jobs, pods))
                _log.info("pair %d: floor %s, operator %s", pair, floors[-1], operators[-1])
                if pair == pairs - 1:
                    later = await live(here, script, operator, jobs, pods, seconds, every, scratch)
            operator.stop()
    ratios = _ratios(operators, floors)
    figures = {
        "jobs": jobs,
        "pods": jobs * pods,
        "floor": floors,
        "operator": operators,
        "floor_with_jobs": floors_with_jobs,
        "objects_per_second_of_floor_by_pair": ratios,
        "objects_per_second_of_floor_with_jobs_by_pair": _ratios(operators, floors_with_jobs),
        **later,
    }
    targets = {
        "objects_per_second_of_floor": target(statistics.median(ratios), ">=", 0.5),
        "writes_per_minute_at_rest": target(later["rest"]["writes_per_minute"], "<=", 0),
        "cpu_share_at_rest": target(later["rest"]["cpu_share"], "<=", 0.05),
        "restart_converged_s": target(later["restart"]["converged_s"], "<=", 60),
        "child_change_p99_s": target(later["changes"]["p99_s"], "<=", 1),
        "resident_mib": target(later["resident_mib"], "<=", 400),
    }
    return figures, targets


def _ratios(operators: list[dict[str, Any]], floors: list[dict[str, Any]]) -> list[float]:
    pairs = zip(operators, floors, strict=True)
    speeds = [(one["objects_per_second"], other["objects_per_second"]) for one, other in pairs]
    return [round(one / other, 3) for one, other in speeds]


async def live(
    here: Place,
    script: Script,
    operator: OperatorProcess,
    jobs: int,
    pods: int,
    seconds: float,
    every: float,
    scratch: Path,
) -> dict[str, Any]:
    """Return what is measured while jobs live: pods, rest, changes, restart, memory."""
    made = await phases.start_pods(here, script, jobs * pods)
    _log.info("pods: %s", made)
    async with phases.coordinators(script, jobs, pods, every):
        settled = await phases.settle(here, every)
        rest = await phases.rest(here, operator, seconds)
        _log.info("settled after %.1f s, rest: %s", settled, rest)
        changes = await phases.changes(here, script, jobs, pods)
        _log.info("changes: %s", changes)
        await phases.settle(here, every)
        metrics = await operator.metrics()
        operator.stop()
        first_peak = operator.peak
        down = await phases.meddle(script, jobs, pods)
        second = OperatorProcess(here, scratch, "operator-b")
        restart = await phases.converged(here, second, script, down)
        _log.info("restart: %s", restart)
        await phases.settle(here, every)
        second.stop()
    return {
        "pods_made": made,
        "settled_s": round(settled, 1),
        "rest": rest,
        "changes": changes,
        "restart": restart,
        "resident_mib": round(max(first_peak, second.peak), 1),
        "metrics": {
            name: value for name, value in metrics.items() if name.startswith("rljob_") and "bucket" not in name
        },
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object (it always does)")
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--pods", type=int, default=16, help="of each job, at least 6")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the rest")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two words of a coordinator")
    parser.add_argument("--pairs", type=int, default=3, help="of floor and operator")
    parser.add_argument("--keep", action="store_true", help="also write benchmarks/results/operator.json")
    time_limit.add_option(parser, TIMEOUT_SECONDS)
    options = parser.parse_args()
    time_limit.limit("benchmarks.operator", options.timeout)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    with tempfile.TemporaryDirectory(prefix="rljob-bench-") as scratch:
        measured = measure(options.jobs, options.pods, options.seconds, options.every, options.pairs, Path(scratch))
        figures, targets = asyncio.run(measured)
    report("operator", figures, targets, options.keep)
    return 0 if all(found["holds"] for found in targets.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
