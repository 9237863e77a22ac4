"""Operators for tests: in this process, so that faults can be injected and clocks set, or as processes that are killed.

In-process::

    async with running_operator(cluster.kubeconfig, [namespace]) as operator: ...

As a process::

    with OperatorProcess(cluster.kubeconfig, [namespace], tmp_path) as process: process.kill()
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from rljob.kube.kubeconfig import from_kubeconfig
from rljob.manifests.inputs import Cluster
from rljob.operator.config import OperatorSettings
from rljob.operator.informers import Informer
from rljob.operator.metrics import Metrics
from rljob.operator.object_kinds import RLJOBS
from rljob.operator.operator_client import OperatorClient
from rljob.operator.plan import Key
from rljob.operator.reconcile import Planner, Result
from rljob.operator.service import Operator
from rljob.protocol.free_port import free_port

Object = dict[str, Any]
SOON = 1.0
"""Seconds. A reconcile that requests another one within this time is not the last: a status update is delayed for a
second, and the first retries of a rejected write follow after at most a second."""
SECONDS = 120.0
"""Time-out of a wait: on a busy machine two seconds have become thirty."""
LEASE = {"durationSeconds": 15, "renewSeconds": 10, "retrySeconds": 0.5}
"""A lease that expires soon enough for a test to wait, and late enough for a busy machine to renew it."""


def settings(namespaces: Sequence[str], **changes: Any) -> OperatorSettings:
    """Return settings for tests: the lease in the first namespace, CPU only, an access mode of every class."""
    data: Object = {
        "namespaces": [*namespaces],
        "cluster": {"accelerator": "cpu", "accessModes": ["ReadWriteOnce"]},
        "lease": LEASE,
        "listen": "127.0.0.1:0",
        "workers": 8,
    }
    return OperatorSettings.model_validate({**data, **changes}, by_alias=True, by_name=False)


class Reconciles:
    """Observes every reconcile of an operator in this process: its start, its end, and whether it was quiet.

    A reconcile is quiet if it succeeded, wrote nothing, and requests no other one within :data:`SOON`.
    """

    def __init__(self, operator: Operator, writes: Callable[[], dict[str, int]]) -> None:
        self.started: Counter[Key] = Counter()
        self.ended: Counter[Key] = Counter()
        self.quiet: dict[Key, bool] = {}
        self._writes = writes
        self._reconcile = operator._reconciler.reconcile
        object.__setattr__(operator._reconciler, "reconcile", self._observed)

    async def _observed(self, key: Key) -> Result:
        self.started[key] += 1
        before, quiet = self._writes(), False
        try:
            result = await self._reconcile(key)
            last = result.what == "done" and (result.after is None or result.after > SOON)
            quiet = last and self._writes() == before
            return result
        finally:
            self.quiet[key] = quiet
            self.ended[key] += 1


@dataclass
class RunningOperator:
    """An operator in this process."""

    operator: Operator
    client: OperatorClient
    namespace: str
    """The first of the namespaces that it watches."""
    task: asyncio.Task[None]
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.reconciles = Reconciles(self.operator, lambda: self.writes)

    @property
    def writes(self) -> dict[str, int]:
        """Number of writes sent, by verb and plural, without Leases."""
        return {what: count for what, count in self.client.writes.items() if not what.endswith(" leases")}

    async def wait_synced(self, seconds: float = SECONDS) -> None:
        """Wait until it is the leader and its caches are filled."""
        async with asyncio.timeout(seconds):
            await self.operator.synced.wait()

    async def idle(self, quiet: float = 1.0, seconds: float = SECONDS) -> None:
        """Wait until it has written nothing for ``quiet`` seconds and its queue is empty."""
        deadline, last, since = time.monotonic() + seconds, self.writes, time.monotonic()
        while time.monotonic() - since < quiet:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the operator still writes: {self.writes}")
            await asyncio.sleep(0.05)
            if self.writes != last or len(self.operator.queue):
                last, since = self.writes, time.monotonic()

    async def sees(self, body: Object) -> None:
        """Wait until the cache holds ``body`` (an RLJob or a child), or a newer version of it."""
        meta, caches = body["metadata"], self.operator.caches
        cache: Any = caches.jobs if body["kind"] == RLJOBS.kind else caches.children[body["kind"]]
        async with asyncio.timeout(SECONDS):
            while True:
                found = cache.find(meta["namespace"], meta["name"])
                if found is not None and int(found.metadata.resource_version) >= int(meta["resourceVersion"]):
                    return
                await asyncio.sleep(0.01)

    async def reconciled(self, name: str = "sums") -> bool:
        """Reconcile a job with the current content of the caches; return whether the reconcile was quiet."""
        key = self.namespace, name
        number = self.reconciles.started[key] + 1  # a running reconcile may have read older caches
        self.operator.queue.add(key)
        async with asyncio.timeout(SECONDS):
            while self.reconciles.ended[key] < number:
                await asyncio.sleep(0.01)
        return self.reconciles.quiet[key]

    async def settled(self, name: str = "sums") -> None:
        """Wait until a reconcile with the current content of the caches was quiet and the queue is empty.

        After that the state is final: no event, no timer and no write of the operator itself is pending.
        """
        async with asyncio.timeout(SECONDS):
            while not await self.reconciled(name) or len(self.operator.queue):
                await asyncio.sleep(0.05)

    async def end(self) -> None:
        """Stop it gracefully, as SIGTERM does; raise the error with which it ended."""
        self.stop.set()
        await self.task

    async def kill(self) -> None:
        """Stop it at once: it writes nothing more and does not release the lease."""
        self.client.may_write = lambda: False
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@contextlib.asynccontextmanager
async def running_operator(
    kubeconfig: Path,
    namespaces: Sequence[str],
    *,
    client: type[OperatorClient] = OperatorClient,
    planner: Planner | None = None,
    cluster: Cluster | None = None,
    wall: Callable[[], float] = time.time,
    synced: bool = True,
    **changes: Any,
) -> AsyncIterator[RunningOperator]:
    """Run an operator in this event loop; stop it gracefully afterwards, unless the test has already stopped it.

    An informer feeds it with RLJobs. In a process kopf does that, but kopf ends all tasks of its event loop.

    Args:
        namespaces: it watches these; its lease is in the first.
        client: class of the client; a test can pass a class that injects faults.
        planner: replaces the real planner.
        cluster: settings for rendering, instead of those of :func:`settings`.
        wall: returns the Unix time in seconds that decisions use.
        synced: wait until it is the leader and its caches are filled.
        changes: settings, named as in the configuration file.
    """
    metrics = Metrics()
    chosen = settings(namespaces, **changes)
    if cluster is not None:
        object.__setattr__(chosen, "for_rendering", lambda: cluster)
    access = from_kubeconfig(kubeconfig)
    async with client(access, count=metrics.count_request, timeout_s=chosen.request_seconds) as kube:
        operator = Operator(kube, chosen, namespaces[0], f"test-{uuid.uuid4().hex[:8]}", metrics, planner, wall)
        stop = asyncio.Event()
        jobs = Informer(kube, operator.caches.jobs, "", namespaces, operator.queue.add, metrics)
        feeding = asyncio.create_task(jobs.run())
        running = RunningOperator(operator, kube, namespaces[0], asyncio.create_task(operator.run(stop)), stop)
        try:
            if synced:
                waiting = asyncio.create_task(running.wait_synced())
                await asyncio.wait([waiting, running.task], return_when=asyncio.FIRST_COMPLETED)
                if running.task.done():
                    waiting.cancel()
                    running.task.result()
                await waiting
            yield running
        finally:
            try:
                if not running.task.done():
                    stop.set()
                    await running.task
            finally:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)


class OperatorProcess:
    """An operator as a separate process.

    Args:
        namespaces: it watches these; its lease is in the first.
        directory: holds its configuration file and its log, and modules with further handlers.
        command: instead of `rljob-operator`; it reads the settings and the kubeconfig from the environment.
        modules: further handlers.
        changes: settings, named as in the configuration file.
    """

    def __init__(
        self,
        kubeconfig: Path,
        namespaces: Sequence[str],
        directory: Path,
        command: Sequence[str] = (),
        modules: Sequence[str] = (),
        **changes: Any,
    ) -> None:
        self.port, self.liveness = free_port(), free_port()
        name = f"operator-{uuid.uuid4().hex[:8]}"
        chosen = settings(namespaces, **{"listen": f"127.0.0.1:{self.port}", **changes})
        config = directory / f"{name}.json"
        config.write_text(json.dumps(chosen.model_dump(mode="json", by_alias=True)))
        self.log = directory / f"{name}.log"
        environment = {
            **os.environ,
            "POD_NAMESPACE": namespaces[0],
            "POD_NAME": name,
            "RLJOB_OPERATOR_CONFIG": str(config),
            "KUBECONFIG": str(kubeconfig),
            "PYTHONPATH": str(directory),
        }
        options = [f"--liveness=http://127.0.0.1:{self.liveness}/healthz"]
        options += [part for module in modules for part in ("-m", module)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *(command or ("rljob.operator.main", "--")), *options],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> OperatorProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    async def metric(self, name: str) -> float | None:
        """Return the value of a metric without labels; None if the operator does not answer."""
        text = await self.text("/metrics")
        lines = [line for line in (text or "").splitlines() if line.startswith(f"{name} ")]
        return float(lines[0].split()[1]) if lines else None

    async def health(self) -> dict[str, Any] | None:
        """Return what kopf's probes report, through the server with limits; None if kopf does not answer."""
        text = await self.text("/healthz")
        return None if text is None else json.loads(text)

    async def text(self, path: str) -> str | None:
        """Return the body at ``path``; None unless the status is 200."""
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://127.0.0.1:{self.port}{path}", timeout=aiohttp.ClientTimeout(total=5)) as response,
            ):
                return await response.text() if response.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None

    async def wait_leader(self, seconds: float = SECONDS) -> None:
        """Wait until it is the leader and ready."""
        async with asyncio.timeout(seconds):
            while await self.metric("rljob_operator_leader") != 1.0 or await self.text("/readyz") is None:
                assert self.process.poll() is None, f"the operator ended: {self.log.read_text()[-2000:]}"
                await asyncio.sleep(0.1)

    def kill(self) -> None:
        """Kill it (SIGKILL) and wait for its exit."""
        self.process.kill()
        self.process.wait()

    def terminate(self, seconds: float = SECONDS) -> int:
        """Stop it gracefully (SIGTERM); return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


_JOB: Object = {
    "apiVersion": "rljob.dev/v1alpha1",
    "kind": "RLJob",
    "metadata": {"name": "sums"},
    "spec": {
        "models": [{"name": "policy", "source": "job://model"}],
        "training": {"steps": 5},
        "tasks": [
            {"name": "sums", "data": {"reasoningGym": {"dataset": "chain_sum"}}, "reward": "sums"},
        ],
        "rewards": [{"name": "sums", "builtin": "reasoning_gym"}],
        "rollouts": [{"name": "main", "replicas": {"min": 2, "max": 4}}],
    },
}


def job(namespace: str, name: str = "sums", **spec: Any) -> Object:
    """Return a small RLJob; ``spec`` replaces fields of its spec."""
    body = copy.deepcopy(_JOB)
    body["metadata"] = {"name": name, "namespace": namespace}
    body["spec"].update(copy.deepcopy(spec))
    return body
