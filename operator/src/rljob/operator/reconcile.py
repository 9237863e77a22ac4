"""Brings one job to what it shall be: look at the caches, plan, do the plan, write the status once, tell of it.

Idempotent and stateless but for memory that only saves work: it may be stopped before or after any of its writes, and
whoever begins anew from what the cluster says comes to the same end.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from rljob.api.status import RLJobStatus
from rljob.manifests.inputs import Cluster
from rljob.operator.cache import SeenJob
from rljob.operator.drift import replicas_of
from rljob.operator.errors import ConflictError, NotFoundError
from rljob.operator.executor import SCALE, Executor
from rljob.operator.informers import Caches
from rljob.operator.jobs import Jobs, Manifest
from rljob.operator.kube import Client
from rljob.operator.mishaps import Mishaps
from rljob.operator.ownership import foreign_sentence, is_ours
from rljob.operator.plan import Key, Observed, Plan, Ref
from rljob.operator.planning.afterlife import is_over
from rljob.operator.planning.stuck import stuck
from rljob.operator.recorder import Recorder
from rljob.operator.resources import RLJOBS
from rljob.operator.rivals import claim_in_use
from rljob.operator.seen import ROLE_LABEL, Child, Meta

log = logging.getLogger(__name__)


class Planner(Protocol):
    """Decides; see :mod:`rljob.operator.planning`."""

    def __call__(self, observed: Observed, cluster: Cluster) -> Plan:
        """Return what is to be done."""
        ...

    def forget(self, uid: str) -> None:
        """Forget a job that is gone."""
        ...


@dataclass(frozen=True)
class Result:
    """How a reconcile ended."""

    what: Literal["done", "retry"]
    """Retry: it learned something while it worked, and is to decide again at once."""
    after: float | None = None
    """Seconds until it is to be looked at again, though nothing changes."""


NOTHING = Result("done")
STATUS_SECONDS = 1.0
"""Between two writes of a job's status, if neither records a decision or turns a condition."""


class Reconciler:
    """Reconciles jobs.

    Args:
        wall: Unix seconds, for what is decided by times in the status.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        client: Client,
        caches: Caches,
        cluster: Cluster,
        planner: Planner,
        recorder: Recorder,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._caches, self._cluster, self._planner = client, caches, cluster, planner
        self._recorder = recorder
        self._wall, self._clock = wall, clock
        self._jobs = Jobs()
        self._executor = Executor(client, caches)
        self._mishaps = Mishaps(client, clock, wall)
        self._uids: dict[Key, str] = {}
        """Of the jobs that something is remembered of."""
        self._written: dict[str, float] = {}
        """uid → when its status was written last."""

    async def reconcile(self, key: Key) -> Result:
        """Bring a job to what it shall be.

        Raises:
            ApiError: something failed that may work later.
        """
        seen = self._caches.jobs.find(*key)
        self._forget_others(key, seen)
        if seen is None:
            return NOTHING
        manifest, status = self._jobs.read(seen)
        if manifest.managed:
            return NOTHING
        observed = self._observe(key, seen, manifest, status)
        named = observed.job.spec.storage.claim if observed.job is not None else None
        late = stuck(observed.pods, observed.children, observed.now, named or "")
        mishaps = await self._mishaps.of(seen.metadata.namespace, late)
        plan = self._planner(replace(observed, mishaps=mishaps), self._cluster)
        if plan.status is None:
            return NOTHING
        try:
            if plan.record_first:
                await self._write_status(seen.metadata, plan, status, decided_on=seen.metadata.resource_version)
                self._tell(seen.metadata, plan)
            if await self._executor.execute(seen.metadata, manifest.job, plan):
                return Result("retry")
            if plan.delete_job:
                await self._delete_job(seen.metadata)
            elif not plan.record_first:
                wait = self._too_soon(seen.metadata, plan, status)
                if wait:
                    return Result("done", wait)
                await self._write_status(seen.metadata, plan, status)
                self._tell(seen.metadata, plan)
        except ConflictError:
            await self._look_again(seen.metadata)
            raise
        moments = [plan.after, self._executor.retry_after(seen.metadata)]
        return Result("done", min((moment for moment in moments if moment is not None), default=None))

    def conditions(self) -> Iterable[tuple[str, str]]:
        """Yield type and status of every condition of every job."""
        return self._jobs.conditions()

    def _tell(self, meta: Meta, plan: Plan) -> None:
        for event in plan.events:
            self._recorder.record(meta, event)

    def _observe(self, key: Key, seen: SeenJob, manifest: Manifest, status: RLJobStatus) -> Observed:
        meta = seen.metadata
        children: dict[Ref, Child] = {}
        foreign: dict[Ref, str] = {}
        for kind, cache in self._caches.children.items():
            for name, child in cache.of_job(key).items():
                if is_ours(meta, kind, child.metadata):
                    children[kind, name] = child
                else:
                    foreign[kind, name] = foreign_sentence(meta, kind, child.metadata)
        troubles = self._executor.troubles(meta)
        return Observed(
            metadata=meta,
            job=manifest.job,
            problems=manifest.problems,
            status=status,
            children=children,
            # What was made before the job belongs to an earlier one of its name. Both times are the API server's.
            pods=[
                pod
                for pod in self._caches.pods.of_job(key).values()
                if pod.metadata.creation_timestamp >= meta.creation_timestamp
            ],
            scales=_scales(children),
            foreign={**foreign, **{ref: trouble.message for ref, trouble in troubles.items() if trouble.foreign}},
            refused={ref: trouble.message for ref, trouble in troubles.items() if not trouble.foreign},
            now=self._wall(),
            claim_in_use=self._claim_in_use(meta, manifest, status),
        )

    def _claim_in_use(self, meta: Meta, manifest: Manifest, status: RLJobStatus) -> str:
        job = manifest.job
        if job is None or job.spec.suspend or is_over(status):
            return ""  # it starts nothing
        return claim_in_use(meta, job, self._caches.jobs, self._caches.children, self._read_other)

    def _read_other(self, seen: SeenJob) -> tuple[Manifest, RLJobStatus]:
        """Read a job that may not have been reconciled yet, so that it is forgotten all the same."""
        self._uids.setdefault((seen.metadata.namespace, seen.metadata.name), seen.metadata.uid)
        return self._jobs.read(seen)

    def _too_soon(self, meta: Meta, plan: Plan, status: RLJobStatus) -> float:
        """Return how long a status waits for what else changes; 0 if it is to be written now.

        Pods become ready one after the other, and each write of an RLJob costs the API server more than all the rest.
        What a person waits for, a condition that turns or has another reason, is never held back.
        """
        assert plan.status is not None, "the job is ours"
        wait = self._written.get(meta.uid, float("-inf")) + STATUS_SECONDS - self._clock()
        if wait <= 0 or _turns(plan.status) != _turns(status) or _same(plan.status, status):
            return 0.0
        return wait

    async def _write_status(self, meta: Meta, plan: Plan, status: RLJobStatus, decided_on: str | None = None) -> None:
        """Write the operator's part of the status, if it changed; only on top of ``decided_on`` if that is given."""
        assert plan.status is not None, "the job is ours"
        if _same(plan.status, status):
            return
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
        self._caches.jobs.put(raw)
        self._written[meta.uid] = self._clock()

    async def _delete_job(self, meta: Meta) -> None:
        with contextlib.suppress(NotFoundError, ConflictError):  # it is gone already
            await self._client.delete(RLJOBS, meta.namespace, meta.name, meta.uid)
        self._caches.jobs.deleted(meta.namespace, meta.name, meta.uid)

    async def _look_again(self, meta: Meta) -> None:
        """Have the RLJob as it is now in the cache: what was decided on was old, and its event may take long."""
        try:
            self._caches.jobs.put(await self._client.get(RLJOBS, meta.namespace, meta.name))
        except NotFoundError:
            self._caches.jobs.deleted(meta.namespace, meta.name, meta.uid)

    def _forget_others(self, key: Key, seen: SeenJob | None) -> None:
        uid = self._uids.get(key)
        if seen is not None and seen.metadata.uid == uid:
            return
        if uid is not None:
            del self._uids[key]
            self._written.pop(uid, None)
            self._jobs.forget(uid)
            self._executor.forget(uid)
            self._planner.forget(uid)
        if seen is not None:
            self._uids[key] = seen.metadata.uid


def _same(planned: RLJobStatus, written: RLJobStatus) -> bool:
    """Return whether two statuses are equal but for what the coordinator writes."""
    return planned.model_copy(update={"run": None}) == written.model_copy(update={"run": None})


def _turns(status: RLJobStatus) -> list[tuple[str, str, str]]:
    return [(condition.type, condition.status, condition.reason) for condition in status.conditions]


def _scales(children: dict[Ref, Child]) -> dict[str, int]:
    """Return role → replicas that somebody asks for."""
    scales = {}
    for (kind, _), child in children.items():
        replicas = replicas_of(child.body) if kind == SCALE else None
        if replicas is not None:
            scales[child.metadata.labels.get(ROLE_LABEL, "")] = replicas
    return scales
