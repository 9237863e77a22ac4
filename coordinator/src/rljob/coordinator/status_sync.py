"""Synchronizes a run with its RLJob in a cluster: reads `spec.suspend` and parts of the status, applies `status.run`.

A suspension takes the same path as POST /v1/suspend; `status.evictedAt` (Kueue) demands one as `spec.suspend` does. If
spec.suspend becomes false before the run has ended, the
suspension is cancelled: nothing was started or discarded in the meantime. Once the run is suspended, the trainer has
its stop command and it is too late; this process then exits, and its restarted container resumes the run from its
ledger as after a crash. Suspended is never reported for a generation whose spec.suspend is false.

The run does not depend on the API server: while it is unavailable, the last known spec stays in effect.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from rljob.coordinator.metrics import REGISTRY
from rljob.coordinator.rljob_client import API_FAILURES, JobRef, LogOnce, RLJobClient, RLJobView
from rljob.coordinator.run import Run
from rljob.coordinator.status_report import state_of, status_of
from rljob.protocol.backoff import Backoff
from rljob.protocol.run_status import run_fields

log = logging.getLogger(__name__)

APPLY_SECONDS = 10.0
POLL_SECONDS = 0.5
"""Interval of checks for a change of state."""

Fields = dict[str, Any]


@dataclass
class ApplyThrottle:
    """Decides when status.run is applied. Pure: the caller passes state and times."""

    applied: Fields | None = None
    """The fields that were applied last."""
    at: float = float("-inf")
    """When they were applied, seconds of any clock."""
    version: int = 0
    """resourceVersion of the RLJob after that."""
    overwritten: bool = False
    """Another client has changed status.run since: restored it from a backup, or deleted it."""

    def on_update(self, view: RLJobView) -> None:
        """Check whether the RLJob still has the fields that were applied last."""
        version = int(view.metadata.resource_version or 0)
        if self.applied is not None and version > self.version:
            run = view.status.run
            self.overwritten = (
                run is None or (run.state, run.reason, run.observed_generation) != transition_key(self.applied)[:3]
            )

    def due(self, fields: Fields, now: float) -> bool:
        """Return whether to apply ``fields``: at once if the transition key differs; otherwise, at most every
        APPLY_SECONDS, if anything but times and metrics differs or the applied fields were overwritten."""
        if self.applied is None or transition_key(fields) != transition_key(self.applied):
            return True
        changed = self.overwritten or comparable_fields(fields) != comparable_fields(self.applied)
        return now - self.at >= APPLY_SECONDS and changed

    def done(self, fields: Fields, version: int, now: float) -> None:
        """Record that ``fields`` were applied."""
        self.applied, self.version, self.at, self.overwritten = fields, version, now, False


def transition_key(fields: Fields) -> Any:
    """Return the part of ``fields`` that users and the operator wait for."""
    drained = sorted(engine["name"] for engine in fields["engines"] if engine["drained"])
    return fields["state"], fields["reason"], fields["observedGeneration"], drained


def comparable_fields(fields: Fields) -> Fields:
    """Return ``fields`` without times, and without metrics, which change with steps only."""
    progress = {name: fields["progress"][name] for name in ("step", "steps")}
    return {name: value for name, value in fields.items() if name != "metrics"} | {"progress": progress}


class StatusSync:
    """Connects a run with its RLJob."""

    def __init__(self, run: Run, job: JobRef) -> None:
        self._run = run
        self._job = job
        self._suspended_by_spec = False
        self._updated = asyncio.Event()
        self._too_late = asyncio.Event()
        self._throttle = ApplyThrottle()

    async def serve(self) -> None:
        """Follow and apply until this process must be replaced. Failures of the API server are logged and retried."""
        client = RLJobClient(self._job)
        REGISTRY.register(StatusSyncCollector(client, self._throttle))
        works = (client.follow(self.on_update), self._apply_when_due(client), self._wait_too_late())
        tasks = [asyncio.create_task(work) for work in works]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # a bug here ends the process, which is restarted
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await client.close()

    async def _wait_too_late(self) -> None:
        await self._too_late.wait()

    def on_update(self, view: RLJobView) -> None:
        """Adopt the RLJob's spec, status.draining and status.evictedAt. Idempotent."""
        self._throttle.on_update(view)
        if view.suspends:
            self._suspended_by_spec = True
            self._run.suspend()
        elif self._suspended_by_spec:
            if not self._run.cancel_suspension():
                log.info("the suspension is withdrawn, but the run has ended already: restarting")
                self._too_late.set()
                return
            self._suspended_by_spec = False
        self._run.draining.drain(view.status.draining)
        self._run.observed_generation = view.metadata.generation
        self._updated.set()

    async def _apply_when_due(self, client: RLJobClient) -> None:
        """Apply status.run whenever it is due; never before the first update, which carries the generation."""
        backoff, failures = Backoff(), LogOnce("applying status.run to the job's RLJob")
        await self._updated.wait()
        while True:
            fields = run_fields(status_of(self._run))
            if not client.gone and self._throttle.due(fields, time.monotonic()):
                try:
                    version = await client.apply_run(fields)
                except API_FAILURES as error:
                    failures.failed(error)
                    await backoff.wait()
                    continue
                failures.succeeded()
                backoff.reset()
                self._throttle.done(fields, version, time.monotonic())
            await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        """Return when the state has changed, or after APPLY_SECONDS."""
        applied, until = self._throttle.applied, time.monotonic() + APPLY_SECONDS
        while time.monotonic() < until:
            await asyncio.sleep(POLL_SECONDS)
            if applied is None:
                return
            drained = sorted(e.name for e in self._run.engines.connected() if self._run.draining.drained(e))
            before = (applied["state"], applied["observedGeneration"], transition_key(applied)[-1])
            if before != (state_of(self._run), self._run.observed_generation, drained):
                return


class StatusSyncCollector:
    """Gauges: seconds since the last watch event, and since status.run was last applied."""

    def __init__(self, client: RLJobClient, throttle: ApplyThrottle) -> None:
        self._client = client
        self._throttle = throttle

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges; none before the first event or apply."""
        now = time.monotonic()
        if self._client.last_event_at:
            yield GaugeMetricFamily(
                "rljob_watch_last_event_age_seconds",
                "Seconds since the last list or watch event about the RLJob",
                value=now - self._client.last_event_at,
            )
        if self._throttle.applied is not None:
            yield GaugeMetricFamily(
                "rljob_status_applied_age_seconds",
                "Seconds since status.run was last applied",
                value=now - self._throttle.at,
            )
