"""The phases of the operator benchmark, called by :mod:`benchmarks.operator`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import statistics
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.operator_audit import Write, counted
from benchmarks.operator_cluster import WORKERS, BenchmarkCluster, OperatorProcess, RequestError, Script
from benchmarks.operator_jobs import changed_spec, children, manifest, name, namespace, run_status
from rljob.manifests.inputs import Object
from rljob.operator.executor import MAX_CONCURRENT_REQUESTS
from rljob.operator.object_kinds import BY_KEY, CHILDREN, RLJOBS, SECRETS
from rljob.operator.operator_client import OperatorClient

SEED = 5
SCRIPT_CONCURRENCY = 16
IDLE_PERIODS = 1.2
"""The operator is idle when it has written nothing for this many periods of the coordinators' updates."""
CHANGES_PER_SECOND = 5.0
NODES = 20
GPUS = 256
RESOURCES = BY_KEY | {SECRETS.kind: SECRETS}
_SECONDS = 900.0
_log = logging.getLogger("benchmark")


async def measure_floor(
    cluster: BenchmarkCluster, jobs: int, pods: int, script: Script | None = None
) -> dict[str, Any]:
    """Create the pre-rendered objects of all jobs as the operator does; with ``script`` also apply the jobs."""
    prefix = "bare" if script is None else "owned"
    rendered = enumerate([children(i, pods, str(uuid.uuid4()), prefix) for i in range(jobs)])
    cluster.namespaces(sorted({namespace(i, prefix) for i in range(jobs)}))
    async with OperatorClient(cluster.operator_access) as client:

        async def make(bodies: Iterable[Object]) -> None:
            slots = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)

            async def one(body: Object) -> None:
                async with slots:
                    resource = RESOURCES[body["kind"]]
                    await client.create(resource, body["metadata"]["namespace"], body)

            await asyncio.gather(*map(one, bodies))

        async def worker() -> None:
            for i, objects in rendered:
                if script is not None:
                    await _apply_job(script, manifest(i, pods, prefix))
                for stage in range(3):
                    await make(body for body in objects if _stage(body["kind"]) == stage)

        start = time.time()
        async with asyncio.TaskGroup() as group:
            for _ in range(WORKERS):
                group.create_task(worker())
    return _made(cluster, start, jobs * len(children(0, pods, "", prefix)))


async def _apply_job(script: Script, job: Object) -> None:
    path = RLJOBS.path(job["metadata"]["namespace"], job["metadata"]["name"])
    await script.request("PATCH", path, job, "apply-patch+yaml", fieldManager="script")


def _stage(kind: str) -> int:
    """Return the executor's stage of a kind: 1: needs an object of stage 0; 2: creates pods."""
    return 2 if RESOURCES[kind].pods else int(kind in ("RoleBinding", "Secret"))


def _made(cluster: BenchmarkCluster, start: float, expected: int) -> dict[str, Any]:
    stored = cluster.audit.since(start, lambda write: write.of_child and write.verb == "create" and write.code == 201)
    assert len(stored) == expected, f"{len(stored)} objects were stored instead of {expected}"
    seconds = max(write.answered for write in stored) - start
    return {
        "objects": expected,
        "seconds": round(seconds, 2),
        "objects_per_second": round(expected / seconds, 1),
        "writes": counted(cluster.audit.since(start)),
    }


async def apply_jobs(script: Script, jobs: int, pods: int) -> None:
    """Apply all jobs, SCRIPT_CONCURRENCY at a time."""
    queue = iter(range(jobs))

    async def worker() -> None:
        for i in queue:
            await _apply_job(script, manifest(i, pods))

    async with asyncio.TaskGroup() as group:
        for _ in range(SCRIPT_CONCURRENCY):
            group.create_task(worker())


async def measure_create(cluster: BenchmarkCluster, script: Script, jobs: int, pods: int) -> dict[str, Any]:
    """Apply all jobs and wait until the operator has created all children."""
    expected = sum(len(children(i, pods, str(uuid.uuid4()), "bench")) for i in range(jobs))
    start = time.time()
    await apply_jobs(script, jobs, pods)
    applied = time.time() - start

    def stored() -> int:
        return len(cluster.audit.since(start, lambda write: write.of_child and write.code == 201))

    await until(
        lambda: stored() >= expected, f"{expected} objects to be stored", lambda: counted(cluster.audit.since(start))
    )
    await asyncio.sleep(2.0)  # so that surplus objects would be counted
    return {**_made(cluster, start, expected), "apply_seconds": round(applied, 2)}


async def measure_start_pods(cluster: BenchmarkCluster, script: Script, pods: int) -> dict[str, Any]:
    """Start controllers, scheduler and nodes; measure the time until all pods run."""
    start = time.time()
    cluster.start_controllers()
    cluster.plane.nodes(NODES, gpus=GPUS, cpu="4096", memory="64Ti")
    running = 0
    async with asyncio.timeout(_SECONDS):
        async for kind, _ in script.watch("/api/v1/pods", {"fieldSelector": "status.phase=Running"}):
            running += {"ADDED": 1, "DELETED": -1}.get(kind, 0)
            if running >= pods:
                break
    seconds = time.time() - start
    return {"pods": pods, "seconds": round(seconds, 1), "pods_per_second": round(pods / seconds, 1)}


async def report_run(script: Script, index: int, pods: int, tick: int) -> None:
    """Apply the ``tick``-th status.run of a job as its coordinator does."""
    body = {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": name(index), "namespace": namespace(index)},
        "status": {"run": run_status(index, pods, tick)},
    }
    user = f"system:serviceaccount:{namespace(index)}:{name(index)}-coordinator"
    path = RLJOBS.path(namespace(index), name(index), "status")
    manager = {"fieldManager": "rljob-coordinator", "force": "true"}
    await script.request("PATCH", path, body, "apply-patch+yaml", user, **manager)


@contextlib.asynccontextmanager
async def in_background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run ``work`` until the end of the context; raise its error there."""
    task = asyncio.create_task(work)
    try:
        yield
        if task.done():
            task.result()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@dataclass
class Reports:
    """What simulated coordinators have reported."""

    sent: int = 0


@contextlib.asynccontextmanager
async def simulate_coordinators(script: Script, jobs: int, pods: int, every: float) -> AsyncIterator[Reports]:
    """Apply status.run of every job every ``every`` seconds, evenly spread in time, as coordinators do."""
    reports = Reports()

    async def update_status() -> None:
        start, n = time.monotonic(), 0
        while True:
            await asyncio.sleep(max(0.0, start + n * every / jobs - time.monotonic()))
            try:
                await report_run(script, n % jobs, pods, n // jobs + 1)
            except RequestError as error:
                if error.code != 403:  # its Role may be among the children that were deleted
                    raise
            n += 1
            reports.sent = n

    async with in_background(update_status()):
        yield reports


async def wait_until_idle(cluster: BenchmarkCluster, every: float) -> float:
    """Wait until the operator is idle; return the seconds from the call to its last write."""
    start = time.time()

    def last() -> float:
        return max([start, *(write.answered for write in cluster.audit.since(start, not_lease))])

    def recent_writes() -> dict[str, int]:
        return counted(cluster.audit.since(time.time() - IDLE_PERIODS * every, not_lease))

    await until(lambda: time.time() - last() > IDLE_PERIODS * every, "the operator to be idle", recent_writes)
    return last() - start


def not_lease(write: Write) -> bool:
    """Return whether an idle operator must not do this write."""
    return write.forbidden_when_idle


async def measure_rest(cluster: BenchmarkCluster, operator: OperatorProcess, seconds: float) -> dict[str, Any]:
    """Measure writes and CPU time of the operator for ``seconds`` in which nothing changes."""
    start, used = time.time(), operator.cpu_seconds()
    await asyncio.sleep(seconds)
    wall, used = time.time() - start, operator.cpu_seconds() - used
    writes = cluster.audit.since(start, not_lease)
    return {
        "seconds": round(wall, 1),
        "writes": counted(writes),
        "writes_per_minute": round(len(writes) * 60 / wall, 2),
        "cpu_share": round(used / wall, 4),
    }


async def measure_changes(
    cluster: BenchmarkCluster, script: Script, changes: Sequence[tuple[int, Object]], patience: float = 5.0
) -> dict[str, Any]:
    """Change specs at a constant rate; measure the time to the first write of a child of the job.

    Args:
        changes: job and merge patch. A job may have several, if the operator has answered the first before the second.
        patience: seconds after the last change in which the operator may answer.
    """
    sent: list[tuple[int, float]] = []
    stored = []
    begin = time.monotonic()
    for n, (i, patch) in enumerate(changes):
        await asyncio.sleep(max(0.0, begin + n / CHANGES_PER_SECOND - time.monotonic()))
        sent.append((i, time.time()))
        await script.request("PATCH", RLJOBS.path(namespace(i), name(i)), patch, "merge-patch+json")
        stored.append(time.time() - sent[-1][1])
    await asyncio.sleep(patience)
    first = [(first_child_write(cluster, i, since), since) for i, since in sent]
    waits = [write.answered - since if write else math.inf for write, since in first]
    return {"changes": len(sent), "stored_p50_s": round(statistics.median(stored), 3), **latencies(waits)}


def latencies(waits: Sequence[float]) -> dict[str, Any]:
    """Return median, 99th percentile (the largest of up to 100 values) and maximum of seconds; infinite: unanswered."""
    ordered = sorted(waits)
    return {
        "p50_s": _finite(ordered[len(ordered) // 2]),
        "p99_s": _finite(percentile_99(ordered)),
        "max_s": _finite(ordered[-1]),
        "unanswered": sum(map(math.isinf, ordered)),
    }


def percentile_99(ordered: Sequence[float]) -> float:
    """Return the 99th percentile of sorted values: the largest of up to 100."""
    return ordered[math.ceil(0.99 * len(ordered)) - 1]


def _finite(seconds: float) -> float:
    """Return seconds as finite JSON: a day stands for never."""
    return round(min(seconds, 86_400.0), 3)


def first_child_write(cluster: BenchmarkCluster, i: int, since: float) -> Write | None:
    """Return the operator's first write of a child of job ``i`` after ``since``, Unix seconds."""

    def of_job(write: Write) -> bool:
        return write.of_child and write.namespace == namespace(i) and write.name.startswith(f"{name(i)}-")

    return min(cluster.audit.since(since, of_job), key=lambda write: write.answered, default=None)


@dataclass(frozen=True)
class OfflineChanges:
    """Changes made while no operator ran, and the children before them."""

    before: frozenset[tuple[str, str, str]]
    """(kind, namespace, name) of all children; the name of a trainer's Job without the number of its attempt."""
    deleted: int
    changed: tuple[int, ...]
    """Jobs whose spec was changed."""


async def _children(script: Script) -> list[tuple[str, str, str]]:
    found = []
    for resource in CHILDREN:
        listed = await script.request("GET", resource.path(), labelSelector="rljob.dev/job")
        found += [(resource.kind, item["metadata"]["namespace"], item["metadata"]["name"]) for item in listed["items"]]
    return found


def _without_attempts(found: Iterable[tuple[str, str, str]]) -> frozenset[tuple[str, str, str]]:
    return frozenset((k, ns, n.rpartition("-")[0] if k == "Job" and "-trainer-" in n else n) for k, ns, n in found)


async def change_offline(script: Script, jobs: int, pods: int) -> OfflineChanges:
    """Delete 5 % of the children and change 5 % of the specs."""
    found = await _children(script)
    # A claim in use is deleted only after its pods, and the operator does not watch Secrets.
    candidates = sorted(child for child in found if child[0] != "PersistentVolumeClaim")
    chosen = random.Random(SEED).sample(candidates, max(1, len(found) // 20))
    for kind, where, what in chosen:
        await script.request("DELETE", BY_KEY[kind].path(where, what), {"propagationPolicy": "Background"})
    changed = tuple(range(0, jobs, 20))
    for i in changed:
        patch = changed_spec(i, pods, "second")
        await script.request("PATCH", RLJOBS.path(namespace(i), name(i)), patch, "merge-patch+json")
    return OfflineChanges(_without_attempts(found), len(chosen), changed)


async def measure_restart(
    cluster: BenchmarkCluster, operator: OperatorProcess, script: Script, done: OfflineChanges
) -> dict[str, Any]:
    """Measure the time from the operator's start until all children exist again and all changes are applied."""
    start = time.time()

    async def missing_objects() -> list[str]:
        missing = done.before - _without_attempts(await _children(script))
        listed = await script.request("GET", RLJOBS.path())
        not_observed = [
            job["metadata"]["name"]
            for job in listed["items"]
            if job["status"].get("observedGeneration") != job["metadata"]["generation"]
        ]
        unchanged = [name(i) for i in done.changed if first_child_write(cluster, i, start) is None]
        return [*(f"{kind} {where}/{what}" for kind, where, what in sorted(missing)), *not_observed, *unchanged]

    async with asyncio.timeout(_SECONDS):
        while left := await missing_objects():
            if not operator.running():
                operator.process.check()
            _log.info("%d objects missing or out of date, for example %s", len(left), left[0])
            await asyncio.sleep(1.0)
    writes = cluster.audit.since(start, not_lease)
    last = max(write.answered for write in writes if write.of_child)
    return {
        "deleted": done.deleted,
        "changed": len(done.changed),
        "first_write_s": round(min(write.answered for write in writes) - start, 2),
        "last_child_write_s": round(last - start, 2),
        "converged_s": round(time.time() - start, 2),
        "writes": counted(writes),
    }


async def until(
    condition: Callable[[], bool], what: str, state: Callable[[], object], seconds: float = _SECONDS
) -> None:
    """Wait until ``condition`` holds.

    Raises:
        TimeoutError: it does not within ``seconds``; the message has ``what`` and the result of ``state``.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:g} s; writes: {state()}")
        await asyncio.sleep(0.1)
