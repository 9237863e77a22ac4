"""Wires the operator: it waits for the lease, fills its caches, and reconciles while it holds the lease.

The caches are filled by consistent lists after the lease is acquired, so the first decision of a new leader knows every
write of the previous one. The operator ends if any background task ends or the lease is lost. kopf runs it
(:mod:`rljob.operator.handlers`); nothing here knows kopf.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import aiohttp

from rljob.kube.errors import ApiError
from rljob.kube.http_session import open_session
from rljob.manifests.inputs import Cluster
from rljob.operator.admission_server import AdmissionServer
from rljob.operator.cluster_version import check_version
from rljob.operator.config import OperatorSettings, Start
from rljob.operator.informers import Caches
from rljob.operator.lease import Lease
from rljob.operator.load_sampler import LoadSampler
from rljob.operator.metrics import Metrics
from rljob.operator.metrics_server import build_app, serving
from rljob.operator.object_kinds import FIELD_MANAGER
from rljob.operator.operator_client import FencedError, OperatorClient
from rljob.operator.plan import Key, Observed, Plan
from rljob.operator.planning import Rendering, plan
from rljob.operator.reconcile import Planner, Reconciler
from rljob.operator.recorder import Recorder
from rljob.operator.work_queue import ClosedError, WorkQueue

log = logging.getLogger(__name__)

FINISH_SECONDS = 8.0
"""Time for running reconciles to finish after SIGTERM."""
POD_SECONDS = 0.2
"""Delay after a change of a pod: pods change in groups and in several steps, and one reconcile handles all of them."""


class RLJobPlanner:
    """The planner of RLJobs, with cached renderings."""

    def __init__(self) -> None:
        self._rendering = Rendering()

    def __call__(self, observed: Observed, cluster: Cluster) -> Plan:
        """Return the plan for a job."""
        return plan(observed, cluster, self._rendering)

    def forget(self, uid: str) -> None:
        """Drop the rendering of a deleted job."""
        self._rendering.forget(uid)


class Operator:
    """One operator; a process has one, a test may have several."""

    def __init__(
        self,
        client: OperatorClient,
        settings: OperatorSettings,
        namespace: str,
        identity: str,
        metrics: Metrics,
        planner: Planner | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.client, self.metrics = client, metrics
        self.cluster = settings.for_rendering()
        lease = settings.lease
        self.lease = Lease(
            client,
            namespace,
            lease.name,
            identity,
            duration_seconds=lease.duration_seconds,
            renew_seconds=lease.renew_seconds,
            retry_seconds=lease.retry_seconds,
        )
        self.queue: WorkQueue[Key] = WorkQueue()
        self.caches = Caches(
            client,
            settings.namespaces,
            on_change=self.queue.add,
            on_pod=lambda key: self.queue.add_after(key, POD_SECONDS),
            metrics=metrics,
        )
        self._recorder = Recorder(client, metrics, identity)
        self.sampler = LoadSampler(self.caches.jobs, self.queue.add, wall)
        self._reconciler = Reconciler(
            client, self.caches, self.cluster, planner or RLJobPlanner(), self._recorder, self.sampler, wall
        )
        self._workers = settings.workers
        self.leading, self.synced = asyncio.Event(), asyncio.Event()
        client.may_write = lambda: self.lease.held
        client.limit_writes(lease.write_seconds)
        metrics.leader.set_function(lambda: float(self.lease.held))
        metrics.queue_depth.set_function(lambda: len(self.queue))
        metrics.at_scrape(
            self._reconciler.conditions, self.caches.counts, self.watch_ages, self._reconciler.desired_pods
        )

    @property
    def ready(self) -> bool:
        """Whether the caches are filled, or the operator is on standby."""
        return self.synced.is_set() or not self.leading.is_set()

    async def run(self, stop: asyncio.Event) -> None:
        """Run the operator until ``stop`` is set.

        Raises:
            LeaseLostError: another operator may be the leader. The process must end.
        """
        await _until(stop, [self._lead()])
        if stop.is_set():
            return
        self.leading.set()
        workers = [asyncio.create_task(self._work()) for _ in range(self._workers)]
        sources = [source.run() for source in self.caches.sources]
        try:
            await _until(
                stop,
                [
                    self.lease.keep(),
                    self._recorder.run(),
                    self.sampler.run(),
                    self._raise_worker_error(workers),
                    self._report_synced(),
                    *sources,
                ],
            )
            await self._finish(workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        await self.lease.release()

    async def _lead(self) -> None:
        await self.caches.job_lister.wait_for_type()
        await self.lease.acquire()

    async def _report_synced(self) -> None:
        await self.caches.synced()
        self.synced.set()
        log.info("caches are filled: %s", self.caches.counts())
        await asyncio.Event().wait()

    async def _work(self) -> None:
        await self.synced.wait()
        while True:
            try:
                key, waited = await self.queue.get()
            except ClosedError:
                return
            self.metrics.queue_wait_seconds.observe(waited)
            try:
                await self._reconcile(key)
            finally:
                self.queue.done(key)

    async def _reconcile(self, key: Key) -> None:
        began, what = time.perf_counter(), "error"
        try:
            result = await self._reconciler.reconcile(key)
        except ApiError as error:
            seconds = self.queue.failed(key, error.retry_after)
            log.info("%s/%s: %s; again in %.1f s", *key, error, seconds)
        except FencedError:
            raise
        except Exception as error:
            # A bug that one job triggers must not stop the other jobs; it is logged with its stack and retried.
            seconds = self.queue.failed(key)
            log.exception("%s/%s: %s; again in %.1f s", *key, type(error).__name__, seconds)
        else:
            what = result.what
            self.queue.succeeded(key)
            if what == "retry":
                self.queue.add(key)
            elif result.after is not None:
                self.queue.add_after(key, result.after)
        self.metrics.reconcile_seconds.labels(what).observe(time.perf_counter() - began)

    async def _raise_worker_error(self, workers: Sequence[asyncio.Task[None]]) -> None:
        """Raise the error of a worker. Cancelling this coroutine does not cancel the workers."""
        done, _ = await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
        for worker in done:
            worker.result()

    async def _finish(self, workers: list[asyncio.Task[None]]) -> None:
        """Let running reconciles finish; the next leader reconciles the queued jobs."""
        self.queue.close()
        await asyncio.wait(workers, timeout=FINISH_SECONDS)

    def watch_ages(self) -> dict[str, float]:
        """Return resource → seconds since its watch received data; empty for a standby."""
        if not self.leading.is_set():
            return {}
        return {informer.cache.resource.metric_label: informer.age for informer in self.caches.informers}


async def _until(stop: asyncio.Event, coroutines: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """Run ``coroutines`` until ``stop`` is set or one of them ends; cancel the others and raise its error."""
    tasks = [asyncio.create_task(coroutine) for coroutine in (stop.wait(), *coroutines)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Service:
    """An operator in the event loop of its process, with its client and its HTTP server.

    Args:
        start: parameters.
        on_end: called when the operator ends without a call of :meth:`stop`.
        liveness: URL of the liveness server of the process, which /healthz asks; empty: it has none.
    """

    def __init__(self, start: Start, on_end: Callable[[], None], liveness: str = "") -> None:
        self.access = start.access
        self.metrics = Metrics()
        settings = start.settings
        self._client = OperatorClient(
            start.access,
            connections=settings.connections,
            timeout_s=settings.request_seconds,
            count=self.metrics.count_request,
        )
        self.operator = Operator(self._client, settings, start.namespace, start.identity, self.metrics)
        self._listen, self._liveness, self._on_end = settings.listen, liveness, on_end
        self._stop = asyncio.Event()
        self._webhook = settings.webhook
        self.admission = AdmissionServer() if settings.webhook is not None else None
        self._open = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        """Start the operator and return; it waits for the Lease in the background.

        Raises:
            OSError: the address for /metrics or for the webhook is in use or not local.
            ValueError: the certificate of the webhook cannot be read.
        """
        await self._open.enter_async_context(self._client)
        server = serving(build_app(self.metrics, lambda: self.operator.ready, self._liveness), self._listen)
        log.info("serving /metrics at port %d", await self._open.enter_async_context(server))
        if self.admission is not None and self._webhook is not None:
            webhook = self.admission.listening(self._webhook)
            log.info("serving the webhook at port %d", await self._open.enter_async_context(webhook))
        self._tasks = [
            asyncio.create_task(self.operator.run(self._stop)),
            asyncio.create_task(self.metrics.measure_lag()),
            asyncio.create_task(check_version(self._client, self.metrics.kubernetes_supported)),
        ]
        self._tasks[0].add_done_callback(self._ended)

    def new_session(self) -> aiohttp.ClientSession:
        """Return a session for requests of others with this operator's credentials, which are read again.

        The caller closes it.
        """
        self.access.forget_credentials()
        return open_session(self.access, FIELD_MANAGER)

    async def stop(self) -> None:
        """Finish the reconciles that run, release the Lease, and stop serving.

        Raises:
            LeaseLostError: another operator may be the leader. The process must end with an error.
            FencedError: a write was not sent for this reason.
            TypesInstalledError: the process must start again.
        """
        self._stop.set()
        try:
            if self._tasks:
                await self._tasks[0]
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._open.aclose()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self._stop.is_set() or task.cancelled():
            return
        log.critical("%s: this process ends", task.exception())
        self._on_end()
