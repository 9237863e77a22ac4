"""The operator with many jobs: objects per second, writes and CPU when idle, time after a restart or a change, memory.

    python -m benchmarks.operator --json [--jobs 200] [--pods 16] [--seconds 60] [--pairs 3] [--keep]

The benchmark uses a real API server and nodes simulated by kwok. The *floor* is a program that uses the operator's
client with the same verbs, concurrency and credentials, but plans nothing: it creates the objects of all jobs, rendered
in advance, in other namespaces of its own control plane. The operator's time is from the first applied RLJob to the
last stored child, so it includes applying the jobs and writing status and events (the figure `floor_with_jobs` is a
floor that also applies the jobs). Floor and operator alternate; each has a fresh control plane without controllers.

The last operator keeps running for the other phases. The controllers start and create the pods. While nothing changes,
a script applies status.run of every job every ten seconds, as coordinators do. The specs change one after another.
The operator restarts after 5 % of the children were deleted and 5 % of the specs were changed while it was stopped.

Times and writes are those of the API server's audit log; the API server runs on this machine and uses the same clock.
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
from benchmarks.operator_cluster import BenchmarkCluster, OperatorProcess, Script, benchmark_cluster
from benchmarks.operator_jobs import changed_spec, namespace
from benchmarks.report import report, target

TIMEOUT_SECONDS = 7200.0  # includes 12 minutes to build the programs of the control plane, the first time
_log = logging.getLogger("benchmark")


async def measure(
    jobs: int, pods: int, seconds: float, every: float, pairs: int, scratch: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return figures and targets of the whole benchmark."""
    floors, floors_with_jobs, operators = [], [], []
    for pair in range(pairs):
        with benchmark_cluster(scratch / f"floor-{pair}") as cluster:
            floors.append(await phases.measure_floor(cluster, jobs, pods))
            async with Script(cluster.plane) as script:
                floors_with_jobs.append(await phases.measure_floor(cluster, jobs, pods, script))
        with benchmark_cluster(scratch / f"operator-{pair}") as cluster:
            cluster.namespaces(sorted({namespace(i) for i in range(jobs)}))
            operator = OperatorProcess(cluster, scratch / f"operator-{pair}", "operator-a")
            await operator.wait_for_lease(cluster)
            async with Script(cluster.plane) as script:
                operators.append(await phases.measure_create(cluster, script, jobs, pods))
                _log.info("pair %d: floor %s, operator %s", pair, floors[-1], operators[-1])
                if pair == pairs - 1:
                    later = await measure_running_jobs(cluster, script, operator, jobs, pods, seconds, every, scratch)
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


async def measure_running_jobs(
    cluster: BenchmarkCluster,
    script: Script,
    operator: OperatorProcess,
    jobs: int,
    pods: int,
    seconds: float,
    every: float,
    scratch: Path,
) -> dict[str, Any]:
    """Return the figures of running jobs: pods, idle operator, changes, restart, memory."""
    made = await phases.measure_start_pods(cluster, script, jobs * pods)
    _log.info("pods: %s", made)
    async with phases.simulate_coordinators(script, jobs, pods, every):
        settled = await phases.wait_until_idle(cluster, every)
        rest = await phases.measure_rest(cluster, operator, seconds)
        _log.info("idle after %.1f s, idle phase: %s", settled, rest)
        specs = [(i, changed_spec(i, pods, "more" if i % 2 else "first")) for i in range(jobs)]
        changes = await phases.measure_changes(cluster, script, specs)
        _log.info("changes: %s", changes)
        await phases.wait_until_idle(cluster, every)
        metrics = await operator.metrics()
        operator.stop()
        first_peak = operator.peak
        down = await phases.change_offline(script, jobs, pods)
        second = OperatorProcess(cluster, scratch, "operator-b")
        restart = await phases.measure_restart(cluster, second, script, down)
        _log.info("restart: %s", restart)
        await phases.wait_until_idle(cluster, every)
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
    """Measure and print; return 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object (there is no other format)")
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--pods", type=int, default=16, help="pods of each job, at least 6")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the idle phase")
    parser.add_argument(
        "--every", type=float, default=10.0, help="seconds between two updates of status.run by one coordinator"
    )
    parser.add_argument("--pairs", type=int, default=3, help="pairs of floor and operator")
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
