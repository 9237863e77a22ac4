"""The phases of the operator's benchmark; :mod:`benchmarks.operator` puts them together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import statistics
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.operator_audit import Write, counted
from benchmarks.operator_cluster import WORKERS, OperatorProcess, Place, RefusedError, Script
from benchmarks.operator_jobs import changed_spec, children, manifest, name, namespace, run_status
from rljob.manifests.inputs import Object
from rljob.operator.executor import AT_A_TIME
from rljob.operator.kube import Client
from rljob.operator.resources import BY_KIND, CHILDREN, RLJOBS, SECRETS

SEED = 5
SCRIPT_CONCURRENCY = 16
QUIET = 1.2
"""The operator is at rest when it has written nothing for so many rounds of the coordinators' words."""
CHANGES_PER_SECOND = 5.0
NODES = 20
GPUS = 256
RESOURCES = BY_KIND | {SECRETS.kind: SECRETS}
_SECONDS = 900.0
_log = logging.getLogger("benchmark")


async def floor(here: Place, jobs: int, pods: int, script: Script | None = None) -> dict[str, Any]:
    """Make the objects of all jobs as the operator does, rendered beforehand; with ``script`` apply the jobs too."""
    prefix = "bare" if script is None else "owned"
    rendered = enumerate([children(i, pods, str(uuid.uuid4()), prefix) for i in range(jobs)])
    here.namespaces(sorted({namespace(i, prefix) for i in range(jobs)}))
    async with Client(here.operator_access) as client:

        async def make(bodies: Iterable[Object]) -> None:
            slots = asyncio.Semaphore(AT_A_TIME)

            async def one(body: Object) -> None:
                async with slots:
                    resource = RESOURCES[body["kind"]]
                    await client.create(resource, body["metadata"]["namespace"], body)

            await asyncio.gather(*map(one, bodies))

        async def worker() -> None:
            for i, objects in rendered:
                if script is not None:
                    await _apply(script, manifest(i, pods, prefix))
                for stage in range(3):
                    await make(body for body in objects if _stage(body["kind"]) == stage)

        start = time.time()
        async with asyncio.TaskGroup() as group:
            for _ in range(WORKERS):
                group.create_task(worker())
    return _made(here, start, jobs * len(children(0, pods, "", prefix)))


async def _apply(script: Script, job: Object) -> None:
    path = RLJOBS.path(job["metadata"]["namespace"], job["metadata"]["name"])
    await script.request("PATCH", path, job, "apply-patch+yaml", fieldManager="script")


def _stage(kind: str) -> int:
    """Return when an object is made, as the executor does: a binding after its role, what pods follow from last."""
    return 2 if RESOURCES[kind].pods else int(kind in ("RoleBinding", "Secret"))


def _made(here: Place, start: float, expected: int) -> dict[str, Any]:
    stored = here.audit.since(start, lambda write: write.of_child and write.verb == "create" and write.code == 201)
    assert len(stored) == expected, f"{len(stored)} objects were stored, and not {expected}"
    seconds = max(write.answered for write in stored) - start
    return {
        "objects": expected,
        "seconds": round(seconds, 2),
        "objects_per_second": round(expected / seconds, 1),
        "writes": counted(here.audit.since(start)),
    }


async def create(here: Place, script: Script, jobs: int, pods: int) -> dict[str, Any]:
    """Apply all jobs and wait until the operator has made all that they consist of."""
    expected = sum(len(children(i, pods, str(uuid.uuid4()), "bench")) for i in range(jobs))
    queue = iter(range(jobs))

    async def worker() -> None:
        for i in queue:
            await _apply(script, manifest(i, pods))

    start = time.time()
    async with asyncio.TaskGroup() as group:
        for _ in range(SCRIPT_CONCURRENCY):
            group.create_task(worker())
    applied = time.time() - start

    def stored() -> int:
        return len(here.audit.since(start, lambda write: write.of_child and write.code == 201))

    await _until(
        lambda: stored() >= expected, f"{expected} objects to be stored", lambda: counted(here.audit.since(start))
    )
    await asyncio.sleep(2.0)  # nothing more is to come
    return {**_made(here, start, expected), "apply_seconds": round(applied, 2)}


async def start_pods(here: Place, script: Script, pods: int) -> dict[str, Any]:
    """Start controllers, scheduler and nodes; wait until all pods run."""
    start = time.time()
    here.start_controllers()
    here.plane.nodes(NODES, gpus=GPUS, cpu="4096", memory="64Ti")
    running = 0
    async with asyncio.timeout(_SECONDS):
        async for kind in script.watch("/api/v1/pods", {"fieldSelector": "status.phase=Running"}):
            running += {"ADDED": 1, "DELETED": -1}.get(kind, 0)
            if running >= pods:
                break
    seconds = time.time() - start
    return {"pods": pods, "seconds": round(seconds, 1), "pods_per_second": round(pods / seconds, 1)}


@contextlib.asynccontextmanager
async def coordinators(script: Script, jobs: int, pods: int, every: float) -> AsyncIterator[None]:
    """Apply status.run of every job each ``every`` seconds, evenly, as their coordinators do."""

    async def speak() -> None:
        start, n = time.monotonic(), 0
        while True:
            await asyncio.sleep(max(0.0, start + n * every / jobs - time.monotonic()))
            i, tick = n % jobs, n // jobs + 1
            body = {
                "apiVersion": "rljob.dev/v1alpha1",
                "kind": "RLJob",
                "metadata": {"name": name(i), "namespace": namespace(i)},
                "status": {"run": run_status(i, pods, tick)},
            }
            user = f"system:serviceaccount:{namespace(i)}:{name(i)}-coordinator"
            path = RLJOBS.path(namespace(i), name(i), "status")
            manager = {"fieldManager": "rljob-coordinator", "force": "true"}
            try:
                await script.request("PATCH", path, body, "apply-patch+yaml", user, **manager)
            except RefusedError as error:
                if error.code != 403:  # its Role may be among the children that were deleted
                    raise
            n += 1

    task = asyncio.create_task(speak())
    try:
        yield
        if task.done():
            task.result()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def settle(here: Place, every: float) -> float:
    """Wait until the operator writes no more, and return after how many seconds it wrote last."""
    start = time.time()

    def last() -> float:
        return max([start, *(write.answered for write in here.audit.since(start, _not_lease))])

    def said() -> dict[str, int]:
        return counted(here.audit.since(time.time() - QUIET * every, _not_lease))

    await _until(lambda: time.time() - last() > QUIET * every, "the operator to be at rest", said)
    return last() - start


def _not_lease(write: Write) -> bool:
    return write.at_rest


async def rest(here: Place, operator: OperatorProcess, seconds: float) -> dict[str, Any]:
    """Measure what the operator writes and computes while nothing is to be done."""
    start, used = time.time(), operator.cpu_seconds()
    await asyncio.sleep(seconds)
    wall, used = time.time() - start, operator.cpu_seconds() - used
    writes = here.audit.since(start, _not_lease)
    return {
        "seconds": round(wall, 1),
        "writes": counted(writes),
        "writes_per_minute": round(len(writes) * 60 / wall, 2),
        "cpu_share": round(used / wall, 4),
    }


async def changes(here: Place, script: Script, jobs: int, pods: int) -> dict[str, Any]:
    """Change every spec once, evenly in time: engines of one job, a template of the next."""
    sent: dict[int, float] = {}
    stored = []
    begin = time.monotonic()
    for i in range(jobs):
        await asyncio.sleep(max(0.0, begin + i / CHANGES_PER_SECOND - time.monotonic()))
        sent[i] = time.time()
        how = "more" if i % 2 else "first"
        await script.request(
            "PATCH", RLJOBS.path(namespace(i), name(i)), changed_spec(i, pods, how), "merge-patch+json"
        )
        stored.append(time.time() - sent[i])
    await asyncio.sleep(5.0)
    first = {i: _first_write(here, i, since) for i, since in sent.items()}
    waits = sorted((write.answered - sent[i] if write else math.inf) for i, write in first.items())
    p99 = waits[math.ceil(0.99 * len(waits)) - 1]
    return {
        "changes": jobs,
        "stored_p50_s": round(statistics.median(stored), 3),
        "p50_s": _finite(waits[len(waits) // 2]),
        "p99_s": _finite(p99),
        "max_s": _finite(waits[-1]),
        "unanswered": sum(map(math.isinf, waits)),
    }


def _finite(seconds: float) -> float:
    """Return what JSON can hold: a day stands for never."""
    return round(min(seconds, 86_400.0), 3)


def _first_write(here: Place, i: int, since: float) -> Write | None:
    def of_job(write: Write) -> bool:
        return write.of_child and write.namespace == namespace(i) and write.name.startswith(f"{name(i)}-")

    return min(here.audit.since(since, of_job), key=lambda write: write.answered, default=None)


@dataclass(frozen=True)
class Meddled:
    """What was done behind the operator's back, and what there was before."""

    before: frozenset[tuple[str, str, str]]
    """Kind, namespace and name of all children; of trainers' Jobs without the attempt."""
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


async def meddle(script: Script, jobs: int, pods: int) -> Meddled:
    """Delete a twentieth of the children and change a twentieth of the specs."""
    found = await _children(script)
    # A claim in use is not gone until its pods are; a Secret the operator never looks at again.
    candidates = sorted(child for child in found if child[0] != "PersistentVolumeClaim")
    chosen = random.Random(SEED).sample(candidates, max(1, len(found) // 20))
    for kind, where, what in chosen:
        await script.request("DELETE", BY_KIND[kind].path(where, what), {"propagationPolicy": "Background"})
    changed = tuple(range(0, jobs, 20))
    for i in changed:
        patch = changed_spec(i, pods, "second")
        await script.request("PATCH", RLJOBS.path(namespace(i), name(i)), patch, "merge-patch+json")
    return Meddled(_without_attempts(found), len(chosen), changed)


async def converged(here: Place, operator: OperatorProcess, script: Script, done: Meddled) -> dict[str, Any]:
    """Wait until all is as it shall be again, and return how long after the operator's start that was."""
    start = time.time()

    async def wanting() -> list[str]:
        missing = done.before - _without_attempts(await _children(script))
        listed = await script.request("GET", RLJOBS.path())
        unseen = [
            job["metadata"]["name"]
            for job in listed["items"]
            if job["status"].get("observedGeneration") != job["metadata"]["generation"]
        ]
        unchanged = [name(i) for i in done.changed if _first_write(here, i, start) is None]
        return [*(f"{kind} {where}/{what}" for kind, where, what in sorted(missing)), *unseen, *unchanged]

    async with asyncio.timeout(_SECONDS):
        while left := await wanting():
            if not operator.running():
                operator.process.check()
            _log.info("%d not as they shall be yet, such as %s", len(left), left[0])
            await asyncio.sleep(1.0)
    writes = here.audit.since(start, _not_lease)
    last = max(write.answered for write in writes if write.of_child)
    return {
        "deleted": done.deleted,
        "changed": len(done.changed),
        "first_write_s": round(min(write.answered for write in writes) - start, 2),
        "last_child_write_s": round(last - start, 2),
        "converged_s": round(time.time() - start, 2),
        "writes": counted(writes),
    }


async def _until(holds: Any, what: str, said: Any) -> None:
    deadline = time.monotonic() + _SECONDS
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {_SECONDS:g} s; writes: {said()}")
        await asyncio.sleep(0.1)
