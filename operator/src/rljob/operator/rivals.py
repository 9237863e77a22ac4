"""Other jobs of the namespace that use a job's claim. Two on one would overwrite each other's models, so that the one
that came later waits; whoever has pods is never made to wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from rljob.api.models import RLJob
from rljob.api.status import RLJobStatus
from rljob.manifests.names import claim_name
from rljob.operator.cache import Cache, SeenJob
from rljob.operator.jobs import Manifest
from rljob.operator.ownership import is_ours
from rljob.operator.planning.afterlife import is_over
from rljob.operator.planning.scene import WORKLOADS, condition, role_of
from rljob.operator.planning.suspension import COORDINATOR
from rljob.operator.seen import Child, Meta


def claim_in_use(
    meta: Meta,
    job: RLJob,
    jobs: Cache[SeenJob],
    children: Mapping[str, Cache[Child]],
    read: Callable[[SeenJob], tuple[Manifest, RLJobStatus]],
) -> str:
    """Return a sentence if another job uses the claim of one that has no pods; an empty text if none does, or if the
    job has begun: then none is looked at, which would be too much for every look at every job.

    Args:
        meta: of the job.
        job: what its user wrote.
        jobs: all that are known.
        children: of all jobs, by kind.
        read: returns what an RLJob says.
    """
    if any(_workloads(meta, children)):
        return ""
    claim = claim_name(meta.name, job.spec.storage.claim)
    for namespace, name in jobs.keys():  # noqa: SIM118 (a cache is no mapping)
        other = jobs.find(namespace, name) if namespace == meta.namespace and name != meta.name else None
        if other is None:
            continue
        manifest, status = read(other)
        if manifest.job is None or claim_name(name, manifest.job.spec.storage.claim) != claim:
            continue
        # A Job that has ended is kept for reading and has no pod that runs.
        running = [
            child for child in _workloads(other.metadata, children) if condition(child, "Complete", "Failed") is None
        ]
        waits = not manifest.managed and not is_over(status) and _age(other.metadata) < _age(meta)
        if running or waits:
            what = _ended(manifest.job, running) if is_over(status) else ""
            remedy = "delete it, wait, or make this job anew with a claim of its own"
            return f"claim {claim} is in use by RLJob {name}{what}; {remedy}"
    return ""


def _age(meta: Meta) -> tuple[str, str]:
    return meta.creation_timestamp, meta.uid


def _workloads(meta: Meta, children: Mapping[str, Cache[Child]]) -> Iterator[Child]:
    for kind in sorted(WORKLOADS):
        for child in children[kind].of_job((meta.namespace, meta.name)).values():
            if is_ours(meta, kind, child.metadata):
                yield child


def _ended(job: RLJob, running: list[Child]) -> str:
    if all(role_of(child) == COORDINATOR for child in running):
        seconds = f"{job.spec.keep_coordinator_seconds:g} s (spec.keepCoordinatorSeconds)"
        return f", which has ended and whose coordinator is kept for {seconds}"
    return ", which has ended and whose pods are being deleted"
