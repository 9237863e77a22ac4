"""CPU time, memory and requests while the operator scale benchmark runs."""

from __future__ import annotations

import asyncio
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from benchmarks import process_counters
from benchmarks.operator_audit import Write
from benchmarks.operator_cluster import BenchmarkCluster, OperatorProcess
from benchmarks.operator_phases import percentile_99

OPERATOR, API_SERVER, BENCHMARK = "operator", "apiserver", "benchmark"
QUIET_SHARE, QUIET_SECONDS, QUIET_LIMIT_SECONDS = 0.1, 3.0, 90.0
"""Processes are quiet if they use less than this share of one core for some seconds."""
_REQUESTS = "rljob_operator_api_requests_total{"


class Processes:
    """The processes of a cluster, its operator and this program, by name."""

    def __init__(self, cluster: BenchmarkCluster, operator: OperatorProcess) -> None:
        components = {name: process.pid for name, process in cluster.plane.processes.items()}
        self._pids = {OPERATOR: operator.process.pid, **components, BENCHMARK: os.getpid()}

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU time that each process has used."""
        return {name: process_counters.cpu_seconds(pid) for name, pid in self._pids.items()}

    async def wait_until_quiet(self) -> None:
        """Wait until the processes have done the work of their start, at most QUIET_LIMIT_SECONDS."""
        begin, used = time.monotonic(), math.inf
        while used > QUIET_SHARE * QUIET_SECONDS and time.monotonic() - begin < QUIET_LIMIT_SECONDS:
            before = sum(self.cpu_seconds().values())
            await asyncio.sleep(QUIET_SECONDS)
            used = sum(self.cpu_seconds().values()) - before

    def resident_mib(self) -> dict[str, float]:
        """Return the resident memory of each process except this one."""
        pids = {name: pid for name, pid in self._pids.items() if name != BENCHMARK}
        return {name: round(process_counters.memory_bytes(pid) / 2**20, 1) for name, pid in pids.items()}


def difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Return the increase of each counter; a counter that is new began at 0."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def divided(values: Mapping[str, float], by: float) -> dict[str, float]:
    """Return each value over ``by``, with three significant digits at least."""
    return {name: round(value / by, 4) for name, value in values.items()}


def busy(cpu_seconds: Mapping[str, float], seconds: float) -> float:
    """Return the share of the machine's cores that the processes used for ``seconds``."""
    return round(sum(cpu_seconds.values()) / seconds / (os.cpu_count() or 1), 3)


def machine_seconds() -> float:
    """Return the CPU time that all programs of this machine have used."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def operator_requests(metrics: Mapping[str, float]) -> Counter[str]:
    """Return the operator's requests by verb and HTTP status."""
    found: Counter[str] = Counter()
    for name, value in metrics.items():
        if name.startswith(_REQUESTS):
            labels = dict(part.split("=") for part in name[len(_REQUESTS) : -1].split(","))
            found[f"{labels['verb']} {labels['code']}".replace('"', "")] += round(value)
    return found


def api_server_requests(cluster: BenchmarkCluster) -> int:
    """Return the number of requests that the API server has answered, without its own and without watches."""
    lines = cluster.plane.kubectl("get", "--raw", "/metrics").splitlines()
    counted = [line for line in lines if line.startswith("apiserver_request_total{") and 'verb="WATCH"' not in line]
    return round(sum(float(line.rpartition(" ")[2]) for line in counted))


def histogram_mean(metrics: Mapping[str, float], name: str, labels: str = "") -> float:
    """Return the mean of a histogram in seconds; 0 if it is empty."""
    count = metrics.get(f"{name}_count{labels}", 0.0)
    return round(metrics[f"{name}_sum{labels}"] / count, 4) if count else 0.0


def write_times(writes: Sequence[Write]) -> dict[str, float]:
    """Return how long the API server took for the operator's writes."""
    seconds = sorted(write.answered - write.received for write in writes) or [0.0]
    return {"p50_s": round(statistics.median(seconds), 4), "p99_s": round(percentile_99(seconds), 4)}


def report_of(metrics: Mapping[str, float], writes: Sequence[Write], jobs: int) -> dict[str, Any]:
    """Return what the operator did for each of ``jobs`` jobs. ``metrics``: increases since before the first job."""
    requests = operator_requests(metrics)
    refused = {what: count for what, count in requests.items() if not what.split()[1].startswith("2") and count}
    verbs: Counter[str] = Counter()
    for what, count in requests.items():
        verbs[what.split()[0]] += count
    done = 'rljob_operator_reconcile_seconds_count{result="done"}'
    return {
        "requests_per_job": round(sum(verbs.values()) / jobs, 2),
        "requests_per_job_by_verb": divided(verbs, jobs),
        "requests_without_success": refused,
        "writes_per_job": round(len(writes) / jobs, 2),
        "reconciles_per_job": round(metrics.get(done, 0.0) / jobs, 2),
        "reconcile_mean_s": histogram_mean(metrics, "rljob_operator_reconcile_seconds", '{result="done"}'),
        "queue_wait_mean_s": histogram_mean(metrics, "rljob_operator_queue_wait_seconds"),
        "time_of_writes_in_api_server": write_times(writes),
    }
