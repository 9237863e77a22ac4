"""Reconciles one RLJob: observe, plan, execute, write status, record events.

A reconcile is idempotent. Cached state only saves requests: the operator may be killed before or after any write, and
restarting from cluster state converges to the same result.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from rljob.api.job_status import RLJobStatus
from rljob.kube.errors import ConflictError, NotFoundError
from rljob.manifests.gang import gang_provider
from rljob.manifests.inputs import Cluster
from rljob.manifests.names import ROLE
from rljob.operator.api_types import Child, Meta
from rljob.operator.cache import CachedJob, read_job
from rljob.operator.change_filter import others_changed
from rljob.operator.cluster_objects import ClusterObjects
from rljob.operator.decoded_jobs import DecodedJobs, Manifest
from rljob.operator.drift import replicas_of
from rljob.operator.executor import Executor
from rljob.operator.informers import Caches
from rljob.operator.load_sampler import LoadSampler
from rljob.operator.object_kinds import RLJOBS, SCALE
from rljob.operator.operator_client import OperatorClient
from rljob.operator.ownership import foreign_sentence, is_ours
from rljob.operator.plan import Key, Observed, Plan, Ref
from rljob.operator.planning.claims import claim_in_use
from rljob.operator.planning.completion import is_over
from rljob.operator.planning.kueue_admission import flavor_names, workload_of
from rljob.operator.planning.stalled import stalled
from rljob.operator.recorder import Recorder
from rljob.operator.warning_events import WarningEvents

log = logging.getLogger(__name__)


class Planner(Protocol):
    """Makes plans; see :mod:`rljob.operator.planning`."""

    def __call__(self, observed: Observed, cluster: Cluster) -> Plan:
        """Return the plan for a job."""
        ...

    def forget(self, uid: str) -> None:
        """Drop the cached state of a deleted job."""
        ...


@dataclass(frozen=True)
class Result:
    """Result of a reconcile."""

    what: Literal["done", "retry"]
    """retry: the execution found that the plan is outdated; reconcile again at once."""
    after: float | None = None
    """Seconds until the next reconcile if nothing changes."""


NOTHING = Result("done")
STATUS_SECONDS = 1.0
"""Minimum time between two status writes that neither record a decision nor change a condition."""


class Reconciler:
    """Reconciles jobs.

    Args:
        wall: Unix seconds; compared with times in the status.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        client: OperatorClient,
        caches: Caches,
        cluster: Cluster,
        planner: Planner,
        recorder: Recorder,
        sampler: LoadSampler,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._caches, self._cluster, self._planner = client, caches, cluster, planner
        self._recorder, self._sampler = recorder, sampler
        self._wall, self._clock = wall, clock
        self._jobs = DecodedJobs()
        self._executor = Executor(client, caches)
        self._warning_events = WarningEvents(client, clock, wall)
        self._cluster_objects = ClusterObjects(client, clock)
        self._uids: dict[Key, str] = {}
        """Uids of the jobs with cached state."""
        self._written: dict[str, float] = {}
        """uid → time of the last write of the status."""

    async def reconcile(self, key: Key) -> Result:
        """Reconcile a job once.

        Raises:
            ApiError: a request failed that may succeed later.
        """
        cached = self._caches.jobs.find(*key)
        self._forget_others(key, cached)
        if cached is None:
            return NOTHING
        manifest, status = self._jobs.read(cached)
        if manifest.managed:
            return NOTHING
        observed = self._observe(key, cached, manifest, status)
        named = observed.job.spec.storage.claim if observed.job is not None else None
        stalled_objects = stalled(observed.pods, observed.children, observed.now, named or "")
        warnings = await self._warning_events.of(cached.metadata.namespace, stalled_objects)
        observed = await self._read_cluster_objects(replace(observed, warnings=warnings))
        plan = self._planner(observed, self._cluster)
        self._sampler.register(key, cached.metadata.uid, plan.sampled)
        if plan.status is None:
            return NOTHING
        try:
            if plan.record_first:
                await self._write_status(cached, plan, status, decided_on=cached.metadata.resource_version)
                self._record_events(cached.metadata, plan)
            if await self._executor.execute(cached.metadata, manifest.job, plan):
                return Result("retry")
            if plan.delete_job:
                await self._delete_job(cached.metadata)
            elif not plan.record_first:
                delay = self._status_delay(cached.metadata, plan, status)
                if delay and not plan.scales:  # a scaling has events
                    return Result("done", delay)
                outdated = await self._write_status(cached, plan, status)
                self._record_events(cached.metadata, plan)
                if outdated:
                    return Result("retry")
        except ConflictError:
            await self._refresh(cached.metadata)
            raise
        delays = [plan.after, self._executor.retry_after(cached.metadata)]
        return Result("done", min((delay for delay in delays if delay is not None), default=None))

    def conditions(self) -> Iterable[tuple[str, str]]:
        """Yield type and status of every condition of every job."""
        return self._jobs.conditions()

    def desired_pods(self) -> Mapping[str, int]:
        """Return kind of role → desired pods of all jobs."""
        return self._jobs.desired_pods()

    def _record_events(self, meta: Meta, plan: Plan) -> None:
        for event in plan.events:
            self._recorder.record(meta, event)

    def _observe(self, key: Key, cached: CachedJob, manifest: Manifest, status: RLJobStatus) -> Observed:
        meta = cached.metadata
        children: dict[Ref, Child] = {}
        foreign: dict[Ref, str] = {}
        for kind, cache in self._caches.children.items():
            for name, child in cache.of_job(key).items():
                if is_ours(meta, kind, child.metadata):
                    children[kind, name] = child
                else:
                    foreign[kind, name] = foreign_sentence(meta, kind, child.metadata)
        child_errors = self._executor.child_errors(meta)
        scales = _scales(children)
        return Observed(
            metadata=meta,
            job=manifest.job,
            problems=manifest.problems,
            status=status,
            children=children,
            # Pods older than the job belong to an earlier job of the same name. The API server has set both times.
            pods=[
                pod
                for pod in self._caches.pods.of_job(key).values()
                if pod.metadata.creation_timestamp >= meta.creation_timestamp
            ],
            scales=scales,
            scale_owners=_scale_owners(children),
            loads=self._sampler.loads(meta.uid, scales),
            foreign={
                **foreign,
                **{ref: child_error.message for ref, child_error in child_errors.items() if child_error.foreign},
            },
            refused={ref: child_error.message for ref, child_error in child_errors.items() if not child_error.foreign},
            now=self._wall(),
            claim_in_use=self._claim_in_use(meta, manifest, status),
        )

    async def _read_cluster_objects(self, observed: Observed) -> Observed:
        """Add what a job in a queue of Kueue refers to; nothing is read for other jobs."""
        job = observed.job
        if job is None or (observed.status.gang_provider or gang_provider(job, self._cluster)) != "kueue":
            return observed
        names = flavor_names(workload_of(observed))
        return replace(
            observed,
            flavors=await self._cluster_objects.flavors(names),
            priority=await self._cluster_objects.priority(job.spec.scheduling.priority_class_name),
        )

    def _claim_in_use(self, meta: Meta, manifest: Manifest, status: RLJobStatus) -> str:
        job = manifest.job
        if job is None or job.spec.suspend or is_over(status):
            return ""  # the job starts no pods
        return claim_in_use(meta, job, self._caches.jobs, self._caches.children, self._read_other)

    def _read_other(self, cached: CachedJob) -> tuple[Manifest, RLJobStatus]:
        """Read a job that may not have been reconciled yet, and register it, to forget it when it is deleted."""
        self._uids.setdefault((cached.metadata.namespace, cached.metadata.name), cached.metadata.uid)
        return self._jobs.read(cached)

    def _status_delay(self, meta: Meta, plan: Plan, status: RLJobStatus) -> float:
        """Return the seconds for which a write of the status is delayed, to be merged with later changes; 0: write now.

        Pods become ready one after the other, and writes of RLJobs are the most expensive requests. A condition with
        another status or reason is never delayed.
        """
        assert plan.status is not None, "managedBy is not set"
        delay = self._written.get(meta.uid, float("-inf")) + STATUS_SECONDS - self._clock()
        if delay <= 0 or _condition_states(plan.status) != _condition_states(status) or _same(plan.status, status):
            return 0.0
        return delay

    async def _write_status(
        self, cached: CachedJob, plan: Plan, status: RLJobStatus, decided_on: str | None = None
    ) -> bool:
        """Write the operator's part of the status if it changed. ``decided_on``: required resourceVersion.

        Returns:
            Whether the answer has changes of others that the plan did not know. Their events come later than the
            answer, and the cache ignores them.
        """
        assert plan.status is not None, "managedBy is not set"
        meta = cached.metadata
        if _same(plan.status, status):
            return False
        metadata = {"name": meta.name, "namespace": meta.namespace, "uid": meta.uid}
        if decided_on is not None:
            metadata["resourceVersion"] = decided_on
        body = {
            "apiVersion": RLJOBS.api_version,
            "kind": RLJOBS.kind,
            "metadata": metadata,
            "status": plan.status_fields(status),
        }
        try:
            raw = await self._client.apply(RLJOBS, meta.namespace, meta.name, body, "status")
        except NotFoundError:
            self._caches.jobs.deleted(meta.namespace, meta.name, meta.uid)
            raise
        answer = read_job(raw)
        self._caches.jobs.take(answer)
        newest = self._caches.jobs.find(meta.namespace, meta.name)
        if newest is not None and newest.metadata.uid == meta.uid:
            self._jobs.read(newest)  # the metrics count what was read last, and an own write starts no reconcile
        self._written[meta.uid] = self._clock()
        return others_changed(cached, answer)

    async def _delete_job(self, meta: Meta) -> None:
        with contextlib.suppress(NotFoundError, ConflictError):  # it was deleted already
            await self._client.delete(RLJOBS, meta.namespace, meta.name, meta.uid)
        self._caches.jobs.deleted(meta.namespace, meta.name, meta.uid)

    async def _refresh(self, meta: Meta) -> None:
        """Read the RLJob into the cache: the plan was based on an old version, and the watch event may be late."""
        try:
            self._caches.jobs.put(await self._client.get(RLJOBS, meta.namespace, meta.name))
        except NotFoundError:
            self._caches.jobs.deleted(meta.namespace, meta.name, meta.uid)

    def _forget_others(self, key: Key, cached: CachedJob | None) -> None:
        uid = self._uids.get(key)
        if cached is not None and cached.metadata.uid == uid:
            return
        if uid is not None:
            del self._uids[key]
            self._written.pop(uid, None)
            self._jobs.forget(uid)
            self._executor.forget(uid)
            self._planner.forget(uid)
            self._sampler.forget(uid)
        if cached is not None:
            self._uids[key] = cached.metadata.uid


def _same(planned: RLJobStatus, written: RLJobStatus) -> bool:
    """Return whether two statuses are equal except for the coordinator's part."""
    return planned.model_copy(update={"run": None}) == written.model_copy(update={"run": None})


def _condition_states(status: RLJobStatus) -> list[tuple[str, str, str]]:
    return [(condition.type, condition.status, condition.reason) for condition in status.conditions]


def _scales(children: dict[Ref, Child]) -> dict[str, int]:
    """Return role → replicas of its RLJobScale."""
    scales = {}
    for (kind, _), child in children.items():
        replicas = replicas_of(child.body) if kind == SCALE else None
        if replicas is not None:
            scales[child.metadata.labels.get(ROLE, "")] = replicas
    return scales


def _scale_owners(children: dict[Ref, Child]) -> dict[str, str]:
    """Return role → what, other than the operator, owns the replicas of its RLJobScale."""
    scales = (child for (kind, _), child in children.items() if kind == SCALE)
    return {child.metadata.labels.get(ROLE, ""): child.scaled_by for child in scales if child.scaled_by}
