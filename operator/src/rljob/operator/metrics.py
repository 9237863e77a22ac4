"""Prometheus metrics of the operator. Names of jobs are never labels: their number is unbounded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

PREFIX = "rljob_operator_"
LAG_SECONDS = 0.5
"""Interval between measurements of the event loop's lag."""


class Metrics:
    """The metrics of one operator, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        quick = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0)
        self.reconcile_seconds = Histogram(
            f"{PREFIX}reconcile_seconds",
            "Time of a reconcile by its result: done, retry (the plan was outdated), error.",
            ["result"],
            buckets=quick,
            registry=self.registry,
        )
        self.queue_wait_seconds = Histogram(
            f"{PREFIX}queue_wait_seconds", "Time a job waited for a worker.", buckets=quick, registry=self.registry
        )
        self.queue_depth = Gauge(f"{PREFIX}queue_depth", "Jobs waiting for a worker.", registry=self.registry)
        self.watch_restarts = Counter(
            f"{PREFIX}watch_restarts",
            "Watches restarted: ended (after timeoutSeconds), gone (too old, listed again), error.",
            ["resource", "reason"],
            registry=self.registry,
        )
        self.api_requests = Counter(
            f"{PREFIX}api_requests",
            "Requests to the Kubernetes API; code is error if there was no response.",
            ["verb", "code"],
            registry=self.registry,
        )
        self.event_loop_lag_seconds = Gauge(
            f"{PREFIX}event_loop_lag_seconds",
            "Maximum delay of the event loop in the last 30 seconds.",
            registry=self.registry,
        )
        self.kubernetes_supported = Gauge(
            f"{PREFIX}kubernetes_supported",
            "1 if this version of rljob supports the Kubernetes version of the cluster, else 0.",
            ["version"],
            registry=self.registry,
        )
        self.leader = Gauge(f"{PREFIX}leader", "1 while this operator is the leader.", registry=self.registry)
        self.scalings = Counter(
            f"{PREFIX}scalings",
            "Decisions of the built-in autoscaler: ScaledOut, ScaledIn.",
            ["reason"],
            registry=self.registry,
        )
        self.events_dropped = Counter(
            f"{PREFIX}events_dropped", "Events that could not be recorded.", registry=self.registry
        )

    def count_request(self, verb: str, code: str) -> None:
        """Count a request to the API."""
        self.api_requests.labels(verb, code).inc()

    def at_scrape(
        self,
        conditions: Callable[[], Iterable[tuple[str, str]]],
        objects: Callable[[], Mapping[str, int]],
        ages: Callable[[], Mapping[str, float]],
        desired: Callable[[], Mapping[str, int]],
    ) -> None:
        """Register metrics that are computed at each scrape.

        Args:
            conditions: type and status of every condition of every job.
            objects: resource → objects in its cache.
            ages: resource → seconds since the last watch event.
            desired: kind of role → desired pods of all jobs.
        """
        self.registry.register(_AtScrape(conditions, objects, ages, desired))

    async def measure_lag(self) -> None:
        """Measure the lag of the event loop. Never returns."""
        window: list[float] = []
        while True:
            began = time.monotonic()
            await asyncio.sleep(LAG_SECONDS)
            window.append(max(0.0, time.monotonic() - began - LAG_SECONDS))
            window = window[-60:]
            self.event_loop_lag_seconds.set(max(window))


class _AtScrape(Collector):
    def __init__(
        self,
        conditions: Callable[[], Iterable[tuple[str, str]]],
        objects: Callable[[], Mapping[str, int]],
        ages: Callable[[], Mapping[str, float]],
        desired: Callable[[], Mapping[str, int]],
    ) -> None:
        self._conditions, self._objects, self._ages, self._desired = conditions, objects, ages, desired

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        jobs = GaugeMetricFamily(f"{PREFIX}jobs", "Jobs by condition.", labels=["condition", "status"])
        counts: dict[tuple[str, str], int] = {}
        for condition in self._conditions():
            counts[condition] = counts.get(condition, 0) + 1
        for (type_, status), count in sorted(counts.items()):
            jobs.add_metric([type_, status], count)
        yield jobs
        objects = GaugeMetricFamily(f"{PREFIX}cached_objects", "Objects in memory.", labels=["resource"])
        for resource, number in self._objects().items():
            objects.add_metric([resource], number)
        yield objects
        desired = GaugeMetricFamily(
            f"{PREFIX}desired_replicas", "Desired pods of all jobs by kind of role.", labels=["role"]
        )
        for kind, number in sorted(self._desired().items()):
            desired.add_metric([kind], number)
        yield desired
        ages = GaugeMetricFamily(
            f"{PREFIX}watch_age_seconds",
            "Seconds since the last event of a watch; about 60 when idle.",
            labels=["resource"],
        )
        for resource, age in self._ages().items():
            ages.add_metric([resource], age)
        yield ages
