"""A coordinator in a cluster: obeys its RLJob (`spec.suspend`, `status.draining`) and tells it how the run is
(`status.run`).

Suspending goes the same way as POST /v1/suspend. If the job is un-suspended before the run has ended, the suspension is
taken back: nothing was begun meanwhile and nothing thrown away. Once the end is decided the trainer has been told to
stop, so it is too late; this process then ends and its container is started again, which takes the run up from its
ledger as after any death. That the run is suspended is never said of a spec that is not.

The run does not depend on any of this: while the API server is away it goes on as it was told last.
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
from rljob.coordinator.own_job import TROUBLE, ApiError, Backoff, Complaints, OwnJob, Place, Seen
from rljob.coordinator.run import Run
from rljob.coordinator.status import state_of, status_of
from rljob.protocol.status import run_fields

log = logging.getLogger(__name__)

APPLY_SECONDS = 10.0
LOOK_SECONDS = 0.5
"""How soon a change of state is noticed."""

Fields = dict[str, Any]


@dataclass
class Cadence:
    """When status.run is due. Pure: told what is and when."""

    applied: Fields | None = None
    """What was applied last."""
    at: float = float("-inf")
    """When."""
    version: int = 0
    """resourceVersion of the RLJob that it was applied to."""
    departed: bool = False
    """Somebody wrote something else there since: the status was restored from a backup, or wiped."""

    def look(self, seen: Seen) -> None:
        """Notice whether the RLJob still says what was applied last."""
        version = int(seen.metadata.resource_version or 0)
        if self.applied is not None and version > self.version:
            run = seen.status.run
            self.departed = run is None or (run.state, run.reason, run.observed_generation) != urgent(self.applied)[:3]

    def due(self, fields: Fields, now: float) -> bool:
        """Whether ``fields`` are to be applied: at once if the state is another, else if anything but clocks moved or
        they are not there any more, at most every APPLY_SECONDS."""
        if self.applied is None or urgent(fields) != urgent(self.applied):
            return True
        return now - self.at >= APPLY_SECONDS and (self.departed or substance(fields) != substance(self.applied))

    def done(self, fields: Fields, version: int, now: float) -> None:
        """``fields`` were applied."""
        self.applied, self.version, self.at, self.departed = fields, version, now, False


def urgent(fields: Fields) -> Any:
    """Return what somebody waits for."""
    drained = sorted(engine["name"] for engine in fields["engines"] if engine["drained"])
    return fields["state"], fields["reason"], fields["observedGeneration"], drained


def substance(fields: Fields) -> Fields:
    """Return ``fields`` without what changes while nothing happens: times, and the metrics, which change with steps."""
    progress = {name: fields["progress"][name] for name in ("step", "steps")}
    return {name: value for name, value in fields.items() if name != "metrics"} | {"progress": progress}


class Cluster:
    """The link between a run and its RLJob."""

    def __init__(self, run: Run, place: Place) -> None:
        self._run = run
        self._place = place
        self._asked = False  # the suspension under way is the spec's
        self._seen = asyncio.Event()
        self._too_late = asyncio.Event()
        self._cadence = Cadence()

    async def serve(self) -> None:
        """Follow and tell until this process is to be replaced; log and go on whatever the API server does."""
        job = OwnJob(self._place)
        REGISTRY.register(ClusterCollector(job, self._cadence))
        tasks = [asyncio.create_task(work) for work in (job.follow(self.obey), self._tell(job), self._wait_too_late())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # a defect of ours ends the process, which comes back
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await job.close()

    async def _wait_too_late(self) -> None:
        await self._too_late.wait()

    # --- what the RLJob asks ---

    def obey(self, seen: Seen) -> None:
        """Do what the job asks; asked again, nothing happens."""
        self._cadence.look(seen)
        if seen.spec.suspend:
            self._asked = True
            self._run.suspend()
        elif self._asked:
            if not self._run.take_suspension_back():
                log.info("the job goes on, and this run of it has ended: starting anew")
                self._too_late.set()
                return
            self._asked = False
        self._run.draining.drain(seen.status.draining)
        self._run.observed_generation = seen.metadata.generation
        self._seen.set()

    # --- what the RLJob is told ---

    async def _tell(self, job: OwnJob) -> None:
        """Apply status.run whenever it is due; not before the spec is known that it is about."""
        backoff, complaints = Backoff(), Complaints("applying status.run to the job's RLJob")
        await self._seen.wait()
        while True:
            fields = run_fields(status_of(self._run))
            if not job.gone and self._cadence.due(fields, time.monotonic()):
                try:
                    version = await job.apply_run(fields)
                except (ApiError, *TROUBLE) as error:
                    complaints.about(error)
                    await backoff.wait()
                    continue
                complaints.over()
                backoff.reset()
                self._cadence.done(fields, version, time.monotonic())
            await self._news()

    async def _news(self) -> None:
        """Return when it may be time to apply again: the state changed, or a while passed."""
        applied, until = self._cadence.applied, time.monotonic() + APPLY_SECONDS
        while time.monotonic() < until:
            await asyncio.sleep(LOOK_SECONDS)
            if applied is None:
                return
            drained = sorted(e.name for e in self._run.engines.connected() if self._run.draining.drained(e))
            before = (applied["state"], applied["observedGeneration"], urgent(applied)[-1])
            if before != (state_of(self._run), self._run.observed_generation, drained):
                return


class ClusterCollector:
    """Ages of what the coordinator knows of its RLJob, and the RLJob of it."""

    def __init__(self, job: OwnJob, cadence: Cadence) -> None:
        self._job = job
        self._cadence = cadence

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges; none before the first word."""
        now = time.monotonic()
        if self._job.heard_at:
            yield GaugeMetricFamily(
                "rljob_job_heard_age_seconds", "Since the API server said anything", value=now - self._job.heard_at
            )
        if self._cadence.applied is not None:
            yield GaugeMetricFamily(
                "rljob_status_applied_age_seconds", "Since status.run was applied", value=now - self._cadence.at
            )
