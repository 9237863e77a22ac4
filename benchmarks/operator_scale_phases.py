"""The measurements of one size of the operator scale benchmark, called by :mod:`benchmarks.operator_scale`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks import operator_phases as phases
from benchmarks import operator_scale_usage as usage
from benchmarks.operator_audit import Write, counted
from benchmarks.operator_cluster import BenchmarkCluster, OperatorProcess, RequestError, Script, benchmark_cluster
from benchmarks.operator_jobs import changed_spec, name, namespace
from rljob.manifests.inputs import Object
from rljob.manifests.names import JOB, ROLE
from rljob.operator.object_kinds import RLJOBS

GPUS_PER_NODE = 256
GPUS_PER_JOB = 16
"""Of a job of 16 pods 12 are used; the others are for engines that a change adds."""
EDITS = 50
KILLS = 20
RESTART_CHANGES = 20
"""One of so many jobs is changed while no operator runs."""
REST_SECONDS = 60.0
"""The operator lists all RLJobs once in this time."""
IDLE_EVERY = 5.0
"""The operator is idle when it has written nothing for IDLE_PERIODS times this."""
FIRST_SECONDS, SECONDS_PER_JOB = 300.0, 4.0
"""Time for the jobs of a size to run."""
POLL_SECONDS, POLL_SECONDS_PER_JOB, LONGEST_POLL_SECONDS = 0.2, 0.02, 2.0
"""Between two scrapes of the operator's metrics: a scrape uses its CPU time."""
_READY = 'rljob_operator_jobs{condition="Ready",status="%s"}'
_log = logging.getLogger("benchmark")


async def measure_size(jobs: int, pods: int, every: float, scratch: Path) -> dict[str, Any]:
    """Return the figures of ``jobs`` jobs of ``pods`` pods in a fresh cluster.

    Args:
        jobs: RLJobs.
        pods: of each job.
        every: seconds between two reports of a coordinator, in the phases in which coordinators report.
        scratch: an empty directory.
    """
    with benchmark_cluster(scratch) as cluster:
        prepare(cluster, jobs)
        operator = OperatorProcess(cluster, scratch, "operator-a")
        await operator.wait_for_lease(cluster)
        async with Script(cluster.plane) as script:
            created = await create(cluster, operator, script, jobs, pods)
            _log.info("%d jobs run: %s", jobs, created)
            settled = await phases.wait_until_idle(cluster, IDLE_EVERY)
            memory = usage.Processes(cluster, operator).resident_mib()
            rest = await measure_rest(cluster, operator)
            edits = await phases.measure_changes(cluster, script, edits_of(jobs, pods, "quiet"), patience=10.0)
            _log.info("at rest: %s; edits: %s", rest, edits)
            kills = await measure_kills(cluster, operator, jobs)
            _log.info("killed trainers: %s", kills)
            await phases.wait_until_idle(cluster, IDLE_EVERY)
            async with phases.simulate_coordinators(script, jobs, pods, every) as reports:
                await phases.wait_until_idle(cluster, IDLE_EVERY)
                reporting = await measure_rest(cluster, operator, reports)
                busy_edits = await phases.measure_changes(cluster, script, edits_of(jobs, pods, "busy"), patience=10.0)
                _log.info("coordinators report: %s; edits: %s", reporting, busy_edits)
            await phases.wait_until_idle(cluster, IDLE_EVERY)
            restart = await measure_restart(cluster, operator, script, jobs, pods, scratch)
            _log.info("restart: %s", restart)
    return {
        "jobs": jobs,
        "pods": jobs * pods,
        "created": created,
        "settled_s": round(settled, 1),
        "resident_mib": memory,
        "rest": rest,
        "edits": edits,
        "kills": kills,
        "reporting": reporting,
        "edits_while_reporting": busy_edits,
        "restart": restart,
        "operator_peak_mib": round(max(operator.peak, restart.pop("peak_mib")), 1),
    }


def prepare(cluster: BenchmarkCluster, jobs: int) -> None:
    """Start controllers and nodes, and create the namespaces of ``jobs`` jobs."""
    cluster.start_controllers()
    cluster.plane.nodes(math.ceil(jobs * GPUS_PER_JOB / GPUS_PER_NODE), gpus=GPUS_PER_NODE, cpu="4096", memory="64Ti")
    cluster.namespaces(sorted({namespace(i) for i in range(jobs)}))


async def create(
    cluster: BenchmarkCluster, operator: OperatorProcess, script: Script, jobs: int, pods: int
) -> dict[str, Any]:
    """Apply all jobs and wait until all run: their pods are ready and their coordinators have reported."""
    processes = usage.Processes(cluster, operator)
    await processes.wait_until_quiet()
    metrics, served = await operator.metrics(), usage.api_server_requests(cluster)
    used, machine, start = processes.cpu_seconds(), usage.machine_seconds(), time.time()
    async with coordinators_that_start(script, pods):
        await phases.apply_jobs(script, jobs, pods)
        applied = time.time() - start
        metrics = usage.difference(await wait_until_running(cluster, operator, jobs), metrics)
    seconds = time.time() - start
    spent = usage.difference(processes.cpu_seconds(), used)
    machine = usage.machine_seconds() - machine
    await _check_all_run(script, jobs)
    writes = cluster.audit.since(start, phases.not_lease)
    served = usage.api_server_requests(cluster) - served
    return {
        "apply_s": round(applied, 2),
        "last_child_s": round(max(write.answered for write in writes if write.of_child) - start, 2),
        "running_s": round(seconds, 2),
        "jobs_per_second": round(jobs / seconds, 3),
        "busy": usage.busy(spent, seconds),
        "machine_busy": usage.busy({"all": machine}, seconds),
        "cpu_seconds_per_job": usage.divided(spent, jobs),
        "api_server_requests_per_job": round(served / jobs, 1),
        "operator": usage.report_of(metrics, writes, jobs),
        "writes": counted(writes),
    }


@contextlib.asynccontextmanager
async def coordinators_that_start(script: Script, pods: int) -> AsyncIterator[None]:
    """Report once for each job, as soon as the pod of its coordinator runs."""
    reported: set[tuple[str, str]] = set()
    selector = {"fieldSelector": "status.phase=Running", "labelSelector": f"{ROLE}=coordinator"}

    async def report(index: int) -> None:
        while True:
            try:
                return await phases.report_run(script, index, pods, 1)
            except RequestError as error:  # an overloaded API server; a coordinator tries again, too
                _log.info("%s", error)
                await asyncio.sleep(1.0)

    async def follow() -> None:
        async with asyncio.TaskGroup() as group:
            while True:  # the API server ends a watch after half an hour
                async for kind, meta in script.watch("/api/v1/pods", selector):
                    key = meta.get("namespace", ""), meta.get("labels", {}).get(JOB, "")
                    if kind == "ADDED" and key not in reported:
                        reported.add(key)
                        group.create_task(report(int(key[1].removeprefix("job-"))))

    async with phases.in_background(follow()):
        yield


async def wait_until_running(cluster: BenchmarkCluster, operator: OperatorProcess, jobs: int) -> Mapping[str, float]:
    """Return the operator's metrics as soon as they count ``jobs`` jobs as Ready.

    Raises:
        TimeoutError: it takes longer than FIRST_SECONDS + SECONDS_PER_JOB × jobs.
    """
    begin = logged = time.monotonic()
    seconds = FIRST_SECONDS + SECONDS_PER_JOB * jobs
    while True:
        metrics = await operator.metrics()
        running = round(metrics.get(_READY % "True", 0.0))
        if running >= jobs:
            return metrics
        operator.process.check()
        cluster.plane.check()
        now = time.monotonic()
        if now - begin > seconds:
            raise TimeoutError(f"{running} of {jobs} jobs run after {seconds:g} s")
        if now - logged > 30.0:
            logged = now
            _log.info("%d of %d jobs run after %.0f s", running, jobs, now - begin)
        await asyncio.sleep(min(max(POLL_SECONDS, POLL_SECONDS_PER_JOB * jobs), LONGEST_POLL_SECONDS))


async def _check_all_run(script: Script, jobs: int) -> None:
    """Compare the metric with the API server."""
    listed = (await script.request("GET", RLJOBS.path()))["items"]
    conditions = [condition for job in listed for condition in job["status"]["conditions"]]
    ready = sum(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
    assert ready == jobs, f"the operator's metrics count {jobs} jobs as Ready, the API server has {ready}"


async def measure_rest(
    cluster: BenchmarkCluster, operator: OperatorProcess, reports: phases.Reports | None = None
) -> dict[str, Any]:
    """Measure REST_SECONDS without a change of a spec. ``reports``: of coordinators that report in this time."""
    processes = usage.Processes(cluster, operator)
    used, sent = processes.cpu_seconds(), reports.sent if reports else 0
    rest = await phases.measure_rest(cluster, operator, REST_SECONDS)
    shares = usage.difference(processes.cpu_seconds(), used)
    rest["cpu_shares"] = usage.divided(shares, rest["seconds"])
    if reports is not None:
        rest["reports_per_second"] = round((reports.sent - sent) / rest["seconds"], 1)
    return rest


def edits_of(jobs: int, pods: int, text: str) -> list[tuple[int, Object]]:
    """Return changes of the runner's pod template, spread over the jobs: EDITS, but at most two of a job.

    ``text`` makes them unique.
    """
    count, of_jobs = min(EDITS, 2 * jobs), min(EDITS, jobs)
    return [(n % of_jobs * jobs // of_jobs, changed_spec(0, pods, f"{text}-{n}")) for n in range(count)]


async def measure_kills(cluster: BenchmarkCluster, operator: OperatorProcess, jobs: int) -> dict[str, Any]:
    """End one trainer pod of up to KILLS jobs with exit code 1; measure the time to the operator's status write."""
    chosen = range(0, jobs, max(1, jobs // KILLS))[:KILLS]
    sent: dict[int, float] = {}
    for i in chosen:
        selector = f"{JOB}={name(i)},{ROLE}=trainer"
        found = cluster.plane.api.list(f"/api/v1/namespaces/{namespace(i)}/pods", labelSelector=selector)
        pod = min(each["metadata"]["name"] for each in found)
        sent[i] = time.time()
        cluster.plane.pods.exit(namespace(i), pod, 1, "ended by the benchmark")
        await asyncio.sleep(1 / phases.CHANGES_PER_SECOND)

    def missing() -> list[int]:
        return [i for i, since in sent.items() if _status_write(cluster, i, since) is None]

    await phases.until(lambda: not missing(), "the ended trainers to be noticed", missing, 120.0)
    waits = [_answered(_status_write(cluster, i, since)) - since for i, since in sent.items()]
    await wait_until_running(cluster, operator, jobs)
    return {
        "kills": len(sent),
        **phases.latencies(waits),
        "all_run_again_s": round(time.time() - max(sent.values()), 1),
    }


def _status_write(cluster: BenchmarkCluster, i: int, since: float) -> Write | None:
    def wanted(write: Write) -> bool:
        return (write.resource, write.subresource, write.namespace, write.name) == (
            "rljobs", "status", namespace(i), name(i),
        )  # fmt: skip

    return min(cluster.audit.since(since, wanted), key=_answered, default=None)


def _answered(write: Write | None) -> float:
    return write.answered if write else math.inf


async def measure_restart(
    cluster: BenchmarkCluster, first: OperatorProcess, script: Script, jobs: int, pods: int, scratch: Path
) -> dict[str, Any]:
    """Stop the operator, change some specs, start another; measure until it has reconciled all jobs.

    A surplus write is one to a job that was not changed.
    """
    first.stop()
    changed = range(0, jobs, RESTART_CHANGES)
    for i in changed:
        patch = changed_spec(i, pods, "stopped")
        await script.request("PATCH", RLJOBS.path(namespace(i), name(i)), patch, "merge-patch+json")
    start = time.time()
    second = OperatorProcess(cluster, scratch, "operator-b")
    processes = usage.Processes(cluster, second)
    used = processes.cpu_seconds()
    reconciled = await _wait_until_reconciled(second, jobs)
    reconciled_s = time.time() - start

    def missing() -> list[int]:
        return [i for i in changed if phases.first_child_write(cluster, i, start) is None]

    await phases.until(lambda: not missing(), "the changes to be applied", missing)
    converged_s = time.time() - start
    spent = usage.difference(processes.cpu_seconds(), used)
    await phases.wait_until_idle(cluster, IDLE_EVERY)
    writes = cluster.audit.since(start, phases.not_lease)
    second.stop()
    return {
        "changed": len(changed),
        "reconciled_s": round(reconciled_s, 2),
        "converged_s": round(converged_s, 2),
        "cpu_seconds": {process: round(seconds, 2) for process, seconds in spent.items()},
        "requests": dict(usage.operator_requests(reconciled)),
        "writes": counted(writes),
        "surplus_writes": len(surplus(writes, changed)),
        "peak_mib": second.peak,
    }


def surplus(writes: Sequence[Write], changed: Sequence[int]) -> list[Write]:
    """Return the writes that belong to none of the changed jobs."""
    own = {(namespace(i), name(i)) for i in changed}
    return [
        write
        for write in writes
        if not any(write.namespace == where and f"{write.name}-".startswith(f"{job}-") for where, job in own)
        and write.resource != "events"
    ]


async def _wait_until_reconciled(operator: OperatorProcess, jobs: int) -> Mapping[str, float]:
    """Return the metrics of a new operator when it has read all jobs and its queue is empty."""
    deadline = time.monotonic() + FIRST_SECONDS + SECONDS_PER_JOB * jobs
    while time.monotonic() < deadline:
        operator.process.check()
        with contextlib.suppress(aiohttp.ClientConnectorError):  # it serves no metrics yet
            metrics = await operator.metrics()
            read = sum(metrics.get(_READY % status, 0.0) for status in ("True", "False"))
            if read >= jobs and metrics["rljob_operator_queue_depth"] == 0:
                return metrics
        await asyncio.sleep(POLL_SECONDS)
    raise TimeoutError(f"the new operator has not reconciled all {jobs} jobs")
