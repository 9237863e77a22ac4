"""Changes an RLJob: applies a manifest, suspends or resumes the job."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from rljob import manifests
from rljob.api.errors import ManifestError
from rljob.api.models import RLJob
from rljob.kube.resource_kinds import APPLY_PATCH, MERGE_PATCH
from rljob.kube.sync_client import Object
from rljob.local.errors import CliError
from rljob.remote.api import CONFLICT, FIELD_MANAGER, ApiRefusedError
from rljob.remote.job import RemoteJob
from rljob.remote.lookup import Namespace, holds, is_active

POLL_SECONDS = 0.5
NOT_RECONCILED_SECONDS = 30.0
"""After this time without a reconcile a message reports that no operator reconciles the RLJob."""
GRACE = "rljob.dev/suspend-grace-seconds"
"""Annotation: value of spec.suspendGraceSeconds before `stop --now`, as JSON."""
OWN_CONFLICT = f'conflict with "{FIELD_MANAGER}"'


def apply(where: Namespace, job: RLJob, source: str, *, dry_run: bool = False, force: bool = False) -> str:
    """Apply a manifest by server-side apply; return created, changed or unchanged.

    Args:
        where: namespace.
        job: only the fields that the manifest sets are applied.
        source: file of the manifest, for errors.
        dry_run: the API server checks the manifest and changes nothing.
        force: take over fields that other managers own.

    Raises:
        ManifestError: a field is not supported in clusters.
        CliError: the API server rejects the manifest.
    """
    if found := manifests.problems(job):
        raise ManifestError(found, source)
    body: Object = job.model_dump(mode="json", by_alias=True, exclude_unset=True)
    body["metadata"]["namespace"] = where.name
    path = where.path(job.metadata.name)
    before = where.api.get(path)["metadata"] if where.has(job.metadata.name) else {}
    query = {"fieldValidation": "Strict"} | ({"dryRun": "All"} if dry_run else {})
    try:
        after = _applied(where, path, body, query, force)["metadata"]
    except ApiRefusedError as error:
        raise _refused(error, where, source) from None
    if before.get("uid") != after["uid"] or not before:
        return "created"
    return "unchanged" if before["resourceVersion"] == after["resourceVersion"] else "changed"


def _applied(where: Namespace, path: str, body: Object, query: dict[str, str], force: bool) -> Object:
    try:
        return where.api.patch(path, body, APPLY_PATCH, force=str(force).lower(), **query)
    except ApiRefusedError as error:
        own = all(str(cause.get("message")).startswith(OWN_CONFLICT) for cause in _causes(error))
        if error.code != CONFLICT or not own:
            raise
    # The conflicting fields were set by `rljob stop`, whose field manager is the same.
    return where.api.patch(path, body, APPLY_PATCH, force="true", **query)


def _causes(error: ApiRefusedError) -> list[dict[str, Any]]:
    return list(error.cause.details.get("causes") or [{}])


def _refused(error: ApiRefusedError, where: Namespace, source: str) -> Exception:
    causes = _causes(error)
    if error.missing_object and error.cause.details.get("kind") == "namespaces":
        return CliError(f"there is no {where.place}; create the namespace, or give another with -n", 2)
    if error.code == CONFLICT and "field" in causes[0]:
        fields = ", ".join(sorted({str(cause["field"]).removeprefix(".") for cause in causes}))
        owner = str(causes[0].get("message", "")).removeprefix("conflict with ").partition(" ")[0]
        return CliError(f"{source}: {fields}: set by {owner}; --force-conflicts takes it over", 2)
    if any(cause.get("field") for cause in causes):  # rules of the CustomResourceDefinition
        return ManifestError(
            [f"{cause['field']}: {cause['message']}" for cause in causes if cause.get("field")], source
        )
    return error


def suspend(job: RemoteJob, now: bool, report: Callable[[str], None]) -> None:
    """Suspend a job; return when it has no pods or has ended.

    Args:
        job: an active one.
        now: do not wait for a checkpoint. ``spec.suspendGraceSeconds`` is 0 during the call; its value is kept in an
            annotation, so that the next stop or resume restores it if this call is interrupted.
        report: called with messages for the user.

    Raises:
        CliError: the API server rejects the change or cannot be reached.
    """
    if now:
        grace = _fields_before_stop(job).get("suspendGraceSeconds", job.body["spec"].get("suspendGraceSeconds"))
        _set(job, {"suspend": True, "suspendGraceSeconds": 0}, {GRACE: json.dumps(grace)})
    else:
        _set(job, {"suspend": True, **_fields_before_stop(job)}, {GRACE: None})
    _wait(job, report)
    if now:
        _set(job, _fields_before_stop(job), {GRACE: None})


def resume(job: RemoteJob) -> None:
    """Resume a suspended job.

    Raises:
        CliError: the API server rejects the change or cannot be reached.
    """
    _set(job, {"suspend": False, **_fields_before_stop(job)}, {GRACE: None})


def _set(job: RemoteJob, fields: dict[str, Any], annotations: dict[str, Any]) -> None:
    api, path = job.namespace.api, job.namespace.path(job.name)
    uid = job.body["metadata"]["uid"]  # so that a new job of the same name is not changed
    job.body = api.patch(path, {"metadata": {"uid": uid, "annotations": annotations}, "spec": fields}, MERGE_PATCH)


def _fields_before_stop(job: RemoteJob) -> dict[str, Any]:
    """Return the fields that `stop --now` changed, with their earlier values."""
    text = (job.body["metadata"].get("annotations") or {}).get(GRACE)
    try:
        return {} if text is None else {"suspendGraceSeconds": json.loads(text)}
    except ValueError:  # not written by rljob
        return {"suspendGraceSeconds": None}


def _wait(job: RemoteJob, report: Callable[[str], None]) -> None:
    generation, begun, reported = job.body["metadata"]["generation"], time.monotonic(), False
    while is_active(job.read()) or (holds(job.body, "Suspended") and not _is_observed(job, generation)):
        if not reported and not _is_observed(job, generation) and time.monotonic() - begun > NOT_RECONCILED_SECONDS:
            reported = True
            seconds = f"{NOT_RECONCILED_SECONDS:.0f} s"
            report(f"no operator has reconciled {job.name} for {seconds}; the job stops when an operator does")
        time.sleep(POLL_SECONDS)


def _is_observed(job: RemoteJob, generation: int) -> bool:
    return int((job.body.get("status") or {}).get("observedGeneration") or 0) >= generation
