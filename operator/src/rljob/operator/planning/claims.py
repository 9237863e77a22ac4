"""Decides whether a job may use its PersistentVolumeClaim.

- A claim of an earlier RLJob of the same name is adopted only if the manifest is the same. The claim of a job that ran
  is never replaced by an empty claim. Both are checked only before a job starts: the claim of a started job belongs to
  the job even if the annotation differs, because another release may hash the same manifest differently, and an upgrade
  must not disturb running jobs.
- Two jobs that use one claim would overwrite each other's models, so the later job waits. A job with pods never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from rljob.api.job_status import RLJobStatus
from rljob.api.models import RLJob
from rljob.manifests.names import JOB, SPEC_HASH, claim_name
from rljob.operator.api_types import Child, Meta
from rljob.operator.cache import Cache, CachedJob
from rljob.operator.decoded_jobs import Manifest
from rljob.operator.object_kinds import CLAIM
from rljob.operator.ownership import is_ours
from rljob.operator.plan import COORDINATOR, Ref
from rljob.operator.planning.completion import is_over
from rljob.operator.planning.job_view import WORKLOADS, JobView, condition, role_of


def lost(view: JobView) -> dict[Ref, str]:
    """Return the claims of a started job that are missing, each with a message.

    An empty claim in its place would lose the run silently. The claim may only have lost its label, so the job waits.
    """
    status, children = view.observed.status, view.observed.children
    if status.run is None and (status.trainer is None or not status.trainer.job_uid):
        return {}  # the claim may not have been created yet
    return {
        ref: f"claim {ref[1]}, which holds the run, is missing: restore its label {JOB}, or create the job again "
        "if the claim was deleted"
        for ref in _rendered(view)
        if ref not in children
    }


def being_deleted(view: JobView) -> dict[Ref, str]:
    """Return the job's claims with a deletionTimestamp, each with a message."""
    children = view.observed.children
    return {
        ref: f"claim {ref[1]} is being deleted and is removed with the last pod that uses it; copy its data now"
        for ref in _rendered(view)
        if ref in children and children[ref].metadata.deletion_timestamp is not None
    }


def of_another_run(view: JobView) -> dict[Ref, str]:
    """Return the job's claims that hold the run of a job with another manifest, each with a message."""
    name, children = view.observed.metadata.name, view.observed.children
    return {
        ref: f"claim {ref[1]} holds the run of an earlier RLJob {name} with another manifest; give this job another "
        "name, or delete the claim if its models are not needed any more"
        for ref, spec_hash in _rendered(view).items()
        if ref in children and children[ref].metadata.annotations.get(SPEC_HASH) != spec_hash
    }


def _rendered(view: JobView) -> dict[Ref, str]:
    """Return the claims that are rendered for the job, with the hash of its immutable fields."""
    objects = (each for role in view.roles for each in role.objects if each["kind"] == CLAIM)
    return {(CLAIM, each["metadata"]["name"]): each["metadata"]["annotations"][SPEC_HASH] for each in objects}


def claim_in_use(
    meta: Meta,
    job: RLJob,
    jobs: Cache[CachedJob],
    children: Mapping[str, Cache[Child]],
    read: Callable[[CachedJob], tuple[Manifest, RLJobStatus]],
) -> str:
    """Return a message if another job uses the claim of a job without pods; empty if no job does.

    For a job with pods the result is empty and no other job is read: reading all jobs in every reconcile would be slow.

    Args:
        meta: of the job.
        job: its manifest.
        jobs: all known jobs.
        children: of all jobs, by kind.
        read: decodes an RLJob.
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
        # A finished Job is kept for its logs, and has no running pods.
        running = [
            child for child in _workloads(other.metadata, children) if condition(child, "Complete", "Failed") is None
        ]
        waits = not manifest.managed and not is_over(status) and _age(other.metadata) < _age(meta)
        if running or waits:
            what = _ended(manifest.job, running) if is_over(status) else ""
            remedy = "delete it, wait, or create this job again with another claim"
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
